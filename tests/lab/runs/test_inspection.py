"""`ksana trace pool`: numbers that agree with each other, files that can be read, and one line for an error."""

import json

import numpy as np
import pytest
import yaml

from ksana_jax.engine.inspect.pool_trace import CACHED, FREE, PoolTrace
from ksana_jax.lab.runs import figures, pool_figure
from ksana_jax.lab.runs.inspection import SnapshotChooser
from tests.fakes import asking, make_engine, prompt_of, step

ENGINE = {
    "block_size": 16,
    "num_blocks": 12,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
    "host_cache_bytes": 100_000,
    "preempt": "swap",
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, one_layer):
    """Path of an experiment with a model of one layer and two rows."""
    given = {
        "title": "Two pools",
        "task": "generate",
        "model": one_layer,
        "load_format": "dummy",
        "engine": ENGINE,
        "settings": {"num_prompts": 4, "prompt_tokens": 40, "output_tokens": 40},
        "variants": [{"name": "full"}, {"name": "window", "pattern.window": 16}],
    }
    path = tmp_path_factory.mktemp("experiment") / "pools.yaml"
    path.write_text(yaml.safe_dump(given))
    return path


def test_one_command_writes_picture_numbers_and_blocks(experiment, tmp_path, run_ksana):
    code, out, err = run_ksana("trace", "pool", experiment, "--out", tmp_path, "--json")
    assert (code, err) == (0, "")
    numbers = json.loads(out.splitlines()[-1])
    assert "Two pools: full, seed 0" in out and "blocks by origin" in out
    assert (tmp_path / "pool.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "pool.pdf").stat().st_size > 1000
    written = json.loads((tmp_path / "pool.json").read_text())
    assert written["numbers"] == numbers and written["config"]["engine"]["num_blocks"] == 12
    # Four requests of 79 computed tokens need 20 blocks of 12: somebody has to make room.
    assert numbers["num_blocks"] == 12 and 0.5 < numbers["utilisation"] < numbers["peak_utilisation"] <= 1
    assert numbers["task"]["num_preemptions"] > 0 and numbers["swapped_blocks"]["in"] > 0
    block = numbers["block_bytes"]
    assert numbers["moved_bytes"]["host to device"] >= numbers["swapped_blocks"]["in"] * block > 0
    assert 0 < numbers["fragmentation"] < 0.5 and numbers["peak_blocks"] <= numbers["peak_unshared_blocks"]
    with np.load(tmp_path / "pool.npz") as arrays:
        owners = arrays["device_owners"]
    assert owners.shape == (numbers["num_steps"], 12) and len(written["steps"]) == numbers["num_steps"]
    held = (owners >= 0).sum(axis=1).tolist()
    assert held == [s["held"]["device"] for s in written["steps"]]
    assert sum(held) / len(held) / 12 == pytest.approx(numbers["utilisation"])
    first, _, *blocks = (tmp_path / "blocks.txt").read_text().splitlines()
    at = int(first.split()[-1])
    assert sum(line.startswith("device") and " held " in line for line in blocks) == held[at - 1] >= 10


def test_a_row_and_a_step_can_be_chosen(experiment, tmp_path, run_ksana):
    code, out, _ = run_ksana("trace", "pool", experiment, "--out", tmp_path, "--row", 2, "--step", 3)
    assert code == 0 and "Two pools: window, seed 0" in out
    assert (tmp_path / "blocks.txt").read_text().startswith("after step 3\n")


def test_a_trial_whose_only_step_releases_everything_says_so(experiment, tmp_path, run_ksana):
    one_step = ["settings={num_prompts: 1, prompt_tokens: 40, output_tokens: 1}", "engine.enable_prefix_caching=false"]
    code, out, _ = run_ksana("trace", "pool", experiment, *one_step, "engine.host_cache_bytes=0", "--out", tmp_path)
    assert code == 0 and "0.0% of 12 blocks after a step, 25.0% at most within one" in out
    assert (tmp_path / "blocks.txt").read_text() == "after step 0\nno step of 1 left a block in use\n"


@pytest.mark.parametrize(
    "args, message",
    [
        (("--row", 3), "row is 3, pools has rows 1 to 2"),
        (("--row", 0), "row is 0, pools has rows 1 to 2"),
        (("--step", 0), "step is 0, must be an integer from 1 or None"),
        (("settings.num_prompt=3",), "'settings.num_prompt' of task 'generate'; the nearest is 'num_prompts'"),
    ],
)
def test_bad_inputs_give_one_clear_line(experiment, tmp_path, run_ksana, args, message):
    code, _, err = run_ksana("trace", "pool", experiment, *args, "--out", tmp_path)
    assert code == 2 and err.startswith("ksana: error: ") and err.endswith(f"{message}\n")
    assert err.count("\n") == 1


def test_a_file_that_is_missing_is_named(tmp_path, run_ksana):
    code, _, err = run_ksana("trace", "pool", tmp_path / "none.yaml")
    assert code == 2 and err.startswith(f"ksana: error: {tmp_path / 'none.yaml'}: no such experiment file; `ksana list")


@pytest.fixture(scope="module")
def trace():
    """The inspection of an engine that shares, caches and swaps."""
    engine = make_engine(num_blocks=14, host_slots=8, caching=True, preempt="swap", max_model_len=40)
    trace = PoolTrace(engine)
    for seed in range(5):
        settings = {"n": 2, "temperature": 1.0, "seed": seed} if seed % 2 else {}
        engine.add_request(prompt_of(12, seed % 3), asking(16, **settings))
    while engine.has_work:
        step(engine)
    return trace


def test_a_picture_has_one_colour_a_request_and_darker_ones_where_it_shares(trace):
    colours = pool_figure.palette()
    picture = pool_figure.image(trace.columns, "device")
    for x, column in enumerate(trace.columns):
        pool = column.pools["device"]
        for block, (owner, shared) in enumerate(zip(pool.owners.tolist(), pool.shared.tolist(), strict=True)):
            expected = {FREE: 1.0, CACHED: 200 / 255}.get(owner, colours[owner % len(colours)] * (0.5 if shared else 1))
            np.testing.assert_allclose(picture[block, x], expected)
    assert any(c.pools["device"].shared.any() for c in trace.columns)


def test_by_owner_it_has_the_same_blocks_in_the_order_of_requests(trace):
    by_block, by_owner = (pool_figure.image(trace.columns, "device", ordered) for ordered in (False, True))
    for x, column in enumerate(trace.columns):
        assert sorted(map(tuple, by_block[:, x])) == sorted(map(tuple, by_owner[:, x]))
        owners = column.pools["device"].owners
        held = np.sort(owners[owners >= 0])
        colours = pool_figure.palette()[held]
        dark = by_owner[: len(held), x]
        assert np.all((np.abs(dark - colours) < 1e-9) | (np.abs(dark - 0.5 * colours) < 1e-9))


def test_the_same_trace_gives_the_same_bytes(trace):
    first, second = (figures.render(lambda f: pool_figure.draw(f, trace.columns), 5.2) for _ in range(2))
    assert first == second and len(first["png"]) > 5000


def test_the_fullest_moment_is_found_to_within_a_tenth():
    engine = make_engine(num_blocks=40, max_model_len=40)
    trace = PoolTrace(engine)
    moment = SnapshotChooser(trace)
    engine.observers.append(moment.observe)
    for seed in range(4):
        engine.add_request(prompt_of(12, seed), asking(16))
    while engine.has_work:
        step(engine)
    most = max(r.blocks_in_use for r in engine.records)
    seen = sum(b.state == "held" for b in moment.snapshot.of("device"))
    assert seen == engine.records[moment.step - 1].blocks_in_use > most / 1.1
