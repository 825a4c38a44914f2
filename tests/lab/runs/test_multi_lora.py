"""Adapters in one engine and apart, on the real engine with a model of one layer."""

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from tests.lab.runs.runs import reported

pytestmark = pytest.mark.usefixtures("few_shapes")

ENGINE = {
    **{"block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 32, "max_num_seqs": 4},
    **{"enable_lora": True, "max_loras": 2, "max_lora_rank": 2, "max_cpu_loras": 8},
}
SETTINGS = {"num_requests": 8, "prompt_tokens": 6, "output_tokens": 5, "skew": 0.0}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, one_layer):
    given = {
        "task": "experiments.multi_lora.task:MultiLora",
        "model": one_layer,
        "load_format": "dummy",
        "engine": ENGINE,
        "settings": SETTINGS,
        "variants": [{"name": str(count), "settings.num_adapters": count} for count in (1, 8)],
    }
    return {row.label: row for row in reported(plan(given), tmp_path_factory.mktemp("out")).rows}


def test_one_adapter_is_written_once(measured):
    row = measured["1"]
    assert row.mean("num_used") == 1 and row.mean("hit_rate") == 7 / 8


def test_more_adapters_than_slots_are_written_again_and_share_steps(measured):
    row = measured["8"]
    [setting] = [m for m in row.trials[0] if m["metric"] == "setting"]
    runs = {m["side"]: m for m in row.trials[0] if m["metric"] == "run"}
    assert 2 < setting["num_used"] <= runs["with"]["num_writes"] <= 8
    assert runs["without"]["num_writes"] == setting["num_used"]
    assert runs["with"]["num_output_tokens"] == runs["without"]["num_output_tokens"] == 40
    assert runs["without"]["num_blocks"] > runs["with"]["num_blocks"] == 40
    assert runs["with"]["mean_running"] > runs["without"]["mean_running"]


def test_an_engine_without_adapters_is_refused(one_layer):
    given = {"task": "experiments.multi_lora.task:MultiLora", "model": one_layer, "load_format": "dummy"}
    with pytest.raises(ConfigError, match=r"engine\.enable_lora is false"):
        plan(given)
