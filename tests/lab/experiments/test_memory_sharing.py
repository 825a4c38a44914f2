"""Sharing by samples and beams, on the real engine with a model of one layer."""

from types import SimpleNamespace

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.experiments.config import plan
from ksana_jax.lab.experiments.texts import prompts_for
from tests.lab.experiments.runs import reported

pytestmark = pytest.mark.usefixtures("few_shapes")

ENGINE = {"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 32, "max_num_seqs": 8}
SETTINGS = {"num_rows": 8, "prompt_tokens": 18, "output_tokens": 11, "num_pairs": 2}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_layer):
    """Folder and report of a run with one and four samples, and four beams; the pool holds five of eight rows."""
    given = {
        "task": "memory_sharing",
        "model": one_layer,
        "load_format": "dummy",
        "engine": ENGINE,
        "settings": SETTINGS,
        "variants": [
            {"name": "one sample", "settings.width": 1},
            {"name": "samples"},
            {"name": "beams", "settings.method": "beam"},
        ],
    }
    folder = tmp_path_factory.mktemp("out")
    made = reported(plan(given), folder)
    return folder, made, {row.label: row for row in made.rows}


def test_one_sample_shares_nothing(measured):
    *_, rows = measured
    assert rows["one sample"].mean("saved") == rows["one sample"].mean("saved_at_peak") == 0


def test_four_samples_hold_the_full_blocks_of_their_prompt_once(measured):
    row = measured[2]["samples"]
    # Each row of 28 computed tokens holds 7 blocks, 4 of them of the prompt alone: 2 x (4 + 4 x 3) of 8 x 7.
    assert row.mean("peak_unshared") == 56
    assert row.mean("saved_at_peak") == pytest.approx(1 - 32 / 56)
    assert 0 < row.mean("saved") < 0.7


def test_beams_share_at_least_what_samples_share(measured):
    *_, rows = measured
    assert rows["beams"].mean("saved_at_peak") >= rows["samples"].mean("saved_at_peak")


def test_the_rows_apart_hold_every_block_for_themselves_and_give_as_many_tokens(measured):
    _, made, _ = measured
    for row in made.rows:
        runs = [m for m in row.trials[0] if m["metric"] == "run"]
        assert {m["num_output_tokens"] for m in runs} == {8 * 11}
        assert [m["pair"] for m in runs] == [0, 0, 1, 1]
        for m in runs:
            if m["side"] == "without":
                assert m["num_requests"] == 8
                assert m["mean_blocks"] == m["mean_unshared"]


def test_the_smaller_share_of_the_pool_lets_more_rows_run_at_once(measured):
    row = measured[2]["samples"]
    assert row.mean("mean_running_with") > row.mean("mean_running_without")
    assert row.mean("num_steps_with") < row.mean("num_steps_without")


def test_the_sentence_leaves_out_rows_that_cannot_share(measured):
    folder, made, _ = measured
    assert "samples: " in made.conclusion and "beams: " in made.conclusion
    assert "one sample" not in made.conclusion
    assert (folder / "figure.png").stat().st_size > 0


def test_a_model_without_a_tokenizer_gets_random_tokens():
    llm = SimpleNamespace(tokenizer=None, model_config=SimpleNamespace(vocab_size=50))
    prompts = np.array(prompts_for(llm, [], num_prompts=3, num_tokens=7, seed=0))
    assert prompts.shape == (3, 7) and 0 <= prompts.min() and prompts.max() < 50
    assert (prompts != prompts_for(llm, [], num_prompts=3, num_tokens=7, seed=1)).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "greedy"}, "settings.method is 'greedy', must be one of sample, beam"),
        ({"method": "beam", "width": 11}, "settings.width of method beam is 11, must be an integer from 1 to 10"),
        ({"num_rows": 6}, "settings.num_rows is 6, must be a multiple of width 4"),
        ({"output_tokens": 0}, "settings.output_tokens is 0, must be an integer from 1"),
    ],
)
def test_settings_that_cannot_be_are_named(one_layer, changes, message):
    given = {"task": "memory_sharing", "model": one_layer, "engine": ENGINE, "settings": {**SETTINGS, **changes}}
    with pytest.raises(ConfigError, match=message):
        plan(given)
