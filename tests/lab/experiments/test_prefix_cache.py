"""The prefix cache on and off, on the real engine with a model of one layer."""

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.experiments.config import plan
from ksana_jax.lab.experiments.tasks.prefix_cache import PrefixSettings, make_prompts
from tests.lab.experiments.runs import Engines, reported

pytestmark = pytest.mark.usefixtures("few_shapes")

ENGINE = {"block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 8, "enable_prefix_caching": True}
SETTINGS = {"num_requests": 8, "prompt_tokens": 40, "output_tokens": 4, "num_pairs": 2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_layer):
    """Folder and report of two seeds of a run with nothing and with 80 % shared, and the engines built for it."""
    given = {
        "task": "prefix_cache",
        "model": one_layer,
        "load_format": "dummy",
        "engine": ENGINE,
        "settings": SETTINGS,
        "grid": {"settings.shared_percent": [0, 80]},
        "seeds": [0, 1],
    }
    engines = Engines()
    folder = tmp_path_factory.mktemp("out")
    return folder, reported(plan(given), folder, make_llm=engines), engines


def runs_of(row, side):
    return [m for trial in row.trials for m in trial if m["metric"] == "run" and m["side"] == side]


def test_requests_of_a_run_find_what_others_of_it_computed_and_nothing_of_former_runs(measured):
    _, made, _ = measured
    nothing, most = made.rows
    assert {m["hit_rate"] for m in runs_of(nothing, "with")} == {0.0}
    # 32 of 40 tokens, for all but the first of eight requests.
    assert [m["hit_rate"] for m in runs_of(most, "with")] == [pytest.approx(0.8 * 7 / 8)] * 4


def test_the_engine_without_a_cache_computes_every_prompt(measured):
    _, made, _ = measured
    for row in made.rows:
        assert {m["hit_rate"] for m in runs_of(row, "without")} == {0.0}
        # The last token of a sequence is never computed.
        assert {m["num_computed_tokens"] for m in runs_of(row, "without")} == {8 * 43}
    assert {m["num_computed_tokens"] for m in runs_of(made.rows[1], "with")} == {8 * 43 - 7 * 32}


def test_both_engines_serve_all_trials_of_the_experiment(measured):
    _, made, engines = measured
    assert len(engines) == 1
    assert [row.mean("compiled_while_timed") for row in made.rows] == [0, 0]
    # Only the first trial of a row can compile: the second finds the twin with what it has compiled.
    assert all(len(runs_of(row, side)) == 4 for row in made.rows for side in ("with", "without"))


def test_the_sentence_gives_the_gain_of_every_row(measured):
    folder, made, _ = measured
    for row, share in zip(made.rows, (0, 80), strict=True):
        # What follows is whether so few pairs on a busy machine resolve it.
        assert f"{row.mean('gain'):.2f} (shared_percent {share}" in made.conclusion
    assert (folder / "figure.png").stat().st_size > 0


def test_two_engines_with_a_cache_are_compared_by_another_setting(tmp_path, one_layer):
    given = {
        "task": "prefix_cache",
        "model": one_layer,
        "load_format": "dummy",
        "engine": ENGINE | {"shared_prefix_attention": True},
        "settings": SETTINGS | {"num_pairs": 1, "against": {"shared_prefix_attention": False}},
    }
    made = reported(plan(given), tmp_path)
    [row] = made.rows
    rates = {side: [m["hit_rate"] for m in runs_of(row, side)] for side in ("with", "without")}
    assert rates["with"] == rates["without"] == [pytest.approx(0.8 * 7 / 8)]
    assert made.conclusion.startswith("Throughput as a multiple of that with shared_prefix_attention: False: ")


def test_prompts_share_one_of_several_beginnings_in_turns():
    settings = PrefixSettings(num_requests=6, prompt_tokens=10, shared_percent=50, num_prefixes=2)
    prompts = np.array(make_prompts(settings, vocab_size=1000, seed=3))
    assert prompts.shape == (6, 10)
    assert (prompts[::2, :5] == prompts[0, :5]).all() and (prompts[1::2, :5] == prompts[1, :5]).all()
    assert (prompts[0, :5] != prompts[1, :5]).any()
    assert len({tuple(p[5:]) for p in prompts.tolist()}) == 6
    assert make_prompts(settings, 1000, 3) == prompts.tolist() != make_prompts(settings, 1000, 4)


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        ({"enable_prefix_caching": False}, {}, "engine.enable_prefix_caching is false"),
        ({"disk_cache_dir": "cache", "host_cache_bytes": 2**20}, {}, "engine.disk_cache_dir is set"),
        ({}, {"shared_percent": 101}, "settings.shared_percent is 101, must be an integer from 0 to 100"),
        (
            {},
            {"against": {"enable_prefix_cache": 0}},
            "settings.against.enable_prefix_cache: no such setting; the nearest",
        ),
        ({}, {"num_prefixes": 0}, "settings.num_prefixes is 0, must be an integer from 1"),
    ],
)
def test_settings_that_cannot_be_are_named(one_layer, engine, settings, message):
    given = {
        "task": "prefix_cache",
        "model": one_layer,
        "engine": {**ENGINE, **engine},
        "settings": {**SETTINGS, **settings},
    }
    with pytest.raises(ConfigError, match=message):
        plan(given)
