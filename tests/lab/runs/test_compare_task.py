"""Two sides of the task compare on the real engine, with a model of one layer."""

from types import SimpleNamespace

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.tasks.compare import CompareSettings, with_prefixes
from ksana_jax.lab.runs.tasks.paired import of_side
from ksana_jax.lab.runs.texts import prompts_for
from tests.lab.runs.runs import Engines, reported

pytestmark = pytest.mark.usefixtures("few_shapes")

ENGINE = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_prefix_caching": True}
SETTINGS = {
    "against": {"enable_prefix_caching": False},
    "num_sequences": 8,
    "prompt_tokens": 40,
    "output_tokens": 4,
    "num_pairs": 2,
}


def given(one_layer, engine=ENGINE, settings=SETTINGS, **fields):
    fixed = {"task": "compare", "model": one_layer, "load_format": "dummy"}
    return fixed | {"engine": engine, "settings": settings} | fields


def runs_of(row, side):
    return [m for trial in row.trials for m in of_side(trial, side)]


@pytest.fixture(scope="module")
def cached(tmp_path_factory, one_layer):
    """Folder and report of two seeds of a run with nothing and with 80 % shared, and the engines built for it."""
    engines, folder = Engines(), tmp_path_factory.mktemp("out")
    shares = {"settings.shared_percent": [0, 80]}
    # With seed 1, two texts also have the block after the shared prefix in common.
    made = reported(plan(given(one_layer, grid=shares, seeds=[0, 2])), folder, make_llm=engines)
    return folder, made, engines


def test_requests_of_a_run_find_what_others_of_it_computed_and_nothing_of_former_runs(cached):
    nothing, most = cached[1].rows
    assert {m["hit_rate"] for m in runs_of(nothing, "with")} == {0.0}
    # 32 of 40 tokens, for all but the first of eight requests.
    assert [m["hit_rate"] for m in runs_of(most, "with")] == [pytest.approx(0.8 * 7 / 8)] * 4


def test_the_engine_without_a_cache_computes_every_prompt_and_gives_the_same_answers(cached):
    _, made, _ = cached
    for row in made.rows:
        assert {m["hit_rate"] for m in runs_of(row, "without")} == {0.0}
        # The last token of a sequence is never computed.
        assert {m["num_computed_tokens"] for m in runs_of(row, "without")} == {8 * 43}
        assert row.mean("same") == 1.0
    assert {m["num_computed_tokens"] for m in runs_of(made.rows[1], "with")} == {8 * 43 - 7 * 32}
    assert made.rows[1].mean("kv_bytes_with") < made.rows[1].mean("kv_bytes_without")


def test_both_engines_serve_all_trials_of_the_experiment(cached):
    _, made, engines = cached
    assert len(engines) == 1
    assert [row.mean("compiled_while_timed") for row in made.rows] == [0, 0]
    # Only the first trial of a row can compile: the second finds the twin with what it has compiled.
    assert all(len(runs_of(row, side)) == 4 for row in made.rows for side in ("with", "without"))


def test_the_report_names_the_other_side(cached):
    folder, made, _ = cached
    assert "Against: enable_prefix_caching: False." in made.notes
    assert (folder / "figure.png").stat().st_size > 0


@pytest.fixture(scope="module")
def widths(tmp_path_factory, one_layer):
    """Rows of a run with one and four samples, and four beams; the pool holds five of eight sequences."""
    settings = {"apart": True, "method": "sample", "num_sequences": 8, "prompt_tokens": 18, "output_tokens": 11}
    variants = [
        {"name": "one sample"},
        {"name": "samples", "settings.width": 4},
        {"name": "beams", "settings.width": 4, "settings.method": "beam"},
    ]
    engine = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    made = reported(plan(given(one_layer, engine, settings, variants=variants)), tmp_path_factory.mktemp("out"))
    return {row.label: row for row in made.rows}


def test_four_samples_hold_the_full_blocks_of_their_prompt_once(widths):
    assert widths["one sample"].mean("saved") == 0
    [run] = runs_of(widths["samples"], "with")
    # Each sequence of 28 computed tokens holds 7 blocks, 4 of them of the prompt alone: 2 x (4 + 4 x 3) of 8 x 7.
    assert (run["peak_blocks"], run["peak_unshared"]) == (32, 56)
    assert 0 < widths["samples"].mean("saved") < 0.7
    [of_beams] = runs_of(widths["beams"], "with")
    assert 1 - of_beams["peak_blocks"] / of_beams["peak_unshared"] >= 1 - 32 / 56


def test_sequences_apart_hold_every_block_for_themselves_and_give_as_many_tokens(widths):
    for row in widths.values():
        [apart], [together] = runs_of(row, "without"), runs_of(row, "with")
        assert apart["num_output_tokens"] == together["num_output_tokens"] == 8 * 11
        assert apart["num_requests"] == 8 and apart["mean_blocks"] == apart["mean_unshared"]
        assert row.mean("same") is None
    row = widths["samples"]
    assert row.mean("mean_running_with") > row.mean("mean_running_without")
    assert row.mean("num_steps_with") < row.mean("num_steps_without")


def test_a_turn_computes_its_text_and_answers_as_without_a_cache(tmp_path, one_layer):
    """Rows evict: each variant has a second engine with its own eviction method."""
    engine = {"block_size": 8, "num_blocks": 5, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
    settings = SETTINGS | {"num_sequences": 1, "prompt_tokens": 100, "output_tokens": 9, "num_pairs": 1}
    eviction = {"method": "h2o", "budget": 32, "prompts": "streamed"}
    variants = [
        {"name": "h2o", "engine.kv_eviction": eviction},
        {"name": "window", "engine.kv_eviction": eviction | {"method": "streaming_llm"}},
    ]
    asked = given(one_layer, engine, settings | {"turns": ["Why?", "How?", "When?"]}, variants=variants)
    for row in reported(plan(asked), tmp_path, make_llm=Engines()).rows:
        [plain], [cached] = runs_of(row, "without"), runs_of(row, "with")
        assert plain["num_requests"] == cached["num_requests"] == 3 and plain["hit_rate"] == 0
        # A later turn computes its text and the last token of the answer before it.
        assert cached["num_computed_tokens"] < plain["num_computed_tokens"] - 200
        assert plain["answers"] == cached["answers"] and row.mean("same") == 1


def test_prompts_share_one_of_several_beginnings_in_rotation():
    settings = CompareSettings(num_sequences=6, prompt_tokens=10, shared_percent=50, num_prefixes=2)
    llm = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(vocab_size=1000))
    drawn = prompts_for(llm, [], num_prompts=6, num_tokens=10, seed=3)  # pyright: ignore[reportArgumentType]
    prompts = np.array(with_prefixes(drawn, settings))
    assert (prompts[::2, :5] == prompts[0, :5]).all() and (prompts[1::2, :5] == prompts[1, :5]).all()
    assert (prompts[0, :5] != prompts[1, :5]).any()
    assert (prompts[:, 5:] == np.array(drawn)[:, 5:]).all() and len({tuple(p[5:]) for p in prompts.tolist()}) == 6
    assert prompts_for(llm, [], 6, 10, seed=4) != drawn  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        ({}, {"against": {}}, "settings.against is empty and settings.apart false: there is nothing to compare"),
        ({}, {"against": {"enable_prefix_cache": 0}}, "settings.against.enable_prefix_cache: no such setting; the nea"),
        ({"disk_cache_dir": "cache", "host_cache_bytes": 2**20}, {}, "engine.disk_cache_dir is set"),
        ({}, {"shared_percent": 101}, "settings.shared_percent is 101, must be an integer from 0 to 100"),
        ({}, {"num_prefixes": 0}, "settings.num_prefixes is 0, must be an integer from 1"),
        ({}, {"method": "best"}, "settings.method is 'best', must be one of greedy, sample, beam"),
        ({}, {"method": "beam", "width": 11}, "settings.width of method beam is 11, must be an integer from 1 to 10"),
        ({}, {"width": 2}, "settings.width of method greedy is 2"),
        ({}, {"method": "sample", "width": 3}, "settings.num_sequences is 8, must be a multiple of width 3"),
        ({}, {"output_tokens": 0}, "settings.output_tokens is 0, must be an integer from 1"),
        ({}, {"turns": []}, r"settings.turns is \[\], must be a list of at least one text"),
        ({}, {"prompt_tokens": 10**7}, r"settings\.num_sequences / settings\.width is 8, but the texts have"),
    ],
)
def test_settings_that_cannot_be_are_named(one_layer, engine, settings, message):
    with pytest.raises(ConfigError, match=message):
        plan(given(one_layer, ENGINE | engine, SETTINGS | settings))
    without_tokenizer = given("configs/models/bench-s", settings=SETTINGS | {"turns": ["Why?"]})
    with pytest.raises(ConfigError, match=r"settings\.turns has text, configs/models/bench-s has no tokenizer"):
        plan(without_tokenizer)
