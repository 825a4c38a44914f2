"""Whatever can be refused at once is refused before a step is compiled or weights are read."""

import pytest

from ksana_jax import LLM
from ksana_jax.core.config import EngineConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.engine.build import build_engine
from ksana_jax.loading import load
from ksana_jax.runner.planner import engine as planner_engine
from tests.engine.small import model
from tests.loading.models_on_disk import TINY, random_tensors, write_model


@pytest.fixture
def nothing_takes_time(monkeypatch):
    """Compiling a step and reading weights are errors."""

    def late(*_, **__):
        raise AssertionError("refused too late")

    monkeypatch.setattr(planner_engine, "step_bytes", late)
    monkeypatch.setattr(load, "read_params", late)


SINKS = AttentionPattern(window=4, num_sinks=2)
REFUSED = {
    "no tokenizer": ({"tokenizer": 5}, "tokenizer is of type int, must be a path"),
    "tokenizer's path": ({"tokenizer": "nowhere"}, "nowhere"),
    "policy": ({"policy": "lifo"}, "policy is 'lifo', must be one of fcfs"),
    "replacement": ({"prefix_replacement": "mru"}, "prefix_replacement is 'mru', must be one of lru"),
    "preset": ({"pattern": "slidng"}, "there is no attention pattern 'slidng'"),
    "patterns": ({"pattern": ["full"] * 3}, "3 attention patterns were given, the model has 2 layers"),
    "sinks": ({"pattern": SINKS, "max_repositioned_sinks": 1}, "2 sinks at 'cache' positions.* at most 1"),
    "implementation": ({"operators": {"attention": "hopper"}}, "operators.attention 'hopper': .*GPU"),
    "host memory": ({"host_cache_bytes": 10**15}, "host_cache_bytes is 1,000,000,000,000,000 .*this machine has"),
    "pool": ({"num_blocks": 10**9, "memory_fraction": None}, "1,000,000,000 KV blocks of .* bytes take"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused_before_anything_takes_time(nothing_takes_time, tmp_path, name):
    settings, message = REFUSED[name]
    folder = write_model(tmp_path / "model", random_tensors(TINY))
    with pytest.raises(ValueError, match=message):
        LLM(folder, **{"memory_fraction": 0.5} | settings)


def test_files_are_refused_before_anything_takes_time(nothing_takes_time, tmp_path):
    tensors = random_tensors(TINY)
    tensors.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"1 tensors do not fit: model\.norm\.weight is missing"):
        LLM(write_model(tmp_path / "model", tensors), memory_fraction=0.5)


def test_a_pool_that_does_not_fit_is_refused_before_weights_are_read():
    def read():
        raise AssertionError("refused too late")

    with pytest.raises(ValueError, match="a KV block takes 4,096 bytes, memory_bytes is 10"):
        build_engine(model()[0], read, EngineConfig(memory_bytes=10))


def test_weights_are_read_once_and_the_plan_is_kept():
    config, params = model()
    settings = EngineConfig(memory_bytes=2**20, max_num_seqs=2, operators={"linear": "xla"})
    engine = build_engine(config, lambda: params, settings)
    assert engine.executor.params is params
    assert engine.memory_plan.num_blocks == engine.config.num_blocks == engine.scheduler.blocks.num_blocks == 8
