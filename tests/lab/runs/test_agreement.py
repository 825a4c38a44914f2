"""Two engines that serve the same texts, on the real engine with a model of one layer."""

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.tasks.agreement import compare
from tests.lab.runs.runs import Engines, reported

pytestmark = pytest.mark.usefixtures("few_shapes")

ENGINE = {"block_size": 4, "max_num_batched_tokens": 32, "max_num_seqs": 4}
SETTINGS = {"num_texts": 4, "prompt_tokens": 8, "output_tokens": 12}


def given(model, **more):
    return {"task": "agreement", "model": model, "load_format": "dummy", "engine": ENGINE, "settings": SETTINGS, **more}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_layer):
    """Folder and report of two seeds, against an engine of the same settings and one in bfloat16; the engines built."""
    variants = [{"name": "itself"}, {"name": "bfloat16", "settings.against": {"dtype": "bf16"}}]
    folder, engines = tmp_path_factory.mktemp("out"), Engines()
    return folder, reported(plan(given(one_layer, variants=variants, seeds=[0, 1])), folder, make_llm=engines), engines


def test_an_engine_agrees_with_itself_bit_by_bit(measured):
    folder, made, engines = measured
    row = made.rows[0]
    assert (row.mean("differ"), row.mean("bits"), row.mean("max_difference"), row.mean("earliest")) == (0, 1, 0, None)
    assert row.mean("gain") > 0 < row.mean("cpu_gain") and row.mean("compiled_while_timed") == 0
    assert len(engines) == 1 and (folder / "figure.png").stat().st_size > 0


def test_another_type_of_numbers_gives_other_bits(measured):
    _, made, _ = measured
    row = made.rows[1]
    assert row.mean("bits") < 0.1 and 1e-5 < row.mean("mean_difference") < row.mean("max_difference")


def test_log_probabilities_are_compared_as_long_as_the_tokens_are_the_same():
    a, b = ([1, 2, 3, 4], np.array([-1.0, -2.0, -3.0, -4.0])), ([1, 2, 9, 4], np.array([-1.0, -2.5, 0.0, -4.0]))
    assert compare(a, b) == {"agreed": 2, "same_bits": 1, "mean_difference": 0.25, "max_difference": 0.5}
    assert compare(a, a) == {"agreed": 4, "same_bits": 4, "mean_difference": 0.0, "max_difference": 0.0}
    assert compare(a, ([0, 2, 3, 4], a[1]))["max_difference"] == 0.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"settings": {"against": {"numeric": "fast"}}}, "settings.against.numeric: .*nearest is 'numerics'"),
        ({"settings": {"against": {"dtype": "f9"}}}, "dtype is 'f9'"),
        ({"settings": {"num_texts": 0}}, "settings.num_texts is 0, must be an integer from 1"),
        ({"engine": {"kv_eviction": {"method": "h2o", "budget": 0.5}}}, "engine.kv_eviction is set"),
    ],
)
def test_settings_that_cannot_be_are_named(one_layer, more, message):
    with pytest.raises(ConfigError, match=message):
        plan(given(one_layer, **more))
