"""Two models in one budget and in halves of it, on the real engine with models of one layer."""

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from tests.lab.runs.runs import reported

pytestmark = pytest.mark.usefixtures("few_shapes")

ENGINE = {
    **{"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 32, "max_num_seqs": 4},
    **{"enable_prefix_caching": True},
}
SETTINGS = {"num_phases": 2, "gap_s": 0.1, "num_chats": 4, "num_turns": 2, "sleep_after": 0.02}
LENGTHS = {"prompt_tokens": 16, "more_tokens": 4, "output_tokens": 4}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_layer):
    given = {
        "task": "experiments.two_models.task:TwoModels",
        "model": one_layer,
        "load_format": "dummy",
        "engine": ENGINE,
        "settings": SETTINGS | LENGTHS,
    }
    [row] = reported(plan(given), tmp_path_factory.mktemp("out")).rows
    return row


def test_what_fits_the_whole_but_not_a_half_is_found_again_only_in_one_budget(measured):
    """Four chats grow to 28 tokens: 28 blocks of the 40, of which a half has 20."""
    runs = {m["side"]: m for m in measured.trials[0] if m["metric"] == "run"}
    assert runs["with"]["num_output_tokens"] == runs["without"]["num_output_tokens"] == 2 * 4 * 2 * 4
    # Each second turn finds the first one's whole blocks: 16 tokens of 24, of 40 in both turns.
    assert runs["with"]["hit_rate"] == pytest.approx(16 / 40)
    assert runs["without"]["hit_rate"] < 16 / 40
    assert runs["with"]["moves_s"] > 0 == runs["without"]["moves_s"]


def test_the_blocks_of_both_must_be_given(one_layer):
    given = {"task": "experiments.two_models.task:TwoModels", "model": one_layer, "load_format": "dummy"}
    with pytest.raises(ConfigError, match=r"engine\.num_blocks is null"):
        plan(given)
