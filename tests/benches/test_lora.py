"""Its rows, on a tiny model."""

import pytest

from experiments.benches.lora import ADAPTED, NONE, WITHOUT, Lora
from ksana_jax.core.errors import ConfigError
from tests.engine.test_lora import engine


def test_steps_with_adapters_are_measured_beside_those_without(monkeypatch):
    given = {"num_blocks": 32, "max_num_batched_tokens": 32}
    monkeypatch.setattr(
        "experiments.benches.lora.make_llm", lambda model, **settings: engine(enable_lora=False, **given)
    )
    bench = Lora(rows=(3,), adapters=2, rank=4, output_tokens=12)
    adapted = engine(max_loras=2, **given)
    bench.start()
    bench.llms |= {NONE: adapted, ADAPTED: adapted}
    found = {case.label: values for case, values in bench.turn(bench.cases())}
    slots = adapted.engine.factory.adapters.slots
    assert slots.num_writes == 2 and found[WITHOUT]["ratio"] == 1
    for label in (NONE, ADAPTED):
        assert found[label]["ratio"] == found[label]["step_s"] / found[WITHOUT]["step_s"]
    bench.close()


def test_counts_are_checked():
    with pytest.raises(ConfigError, match="adapters is 0"):
        Lora(adapters=0).cases()
    with pytest.raises(ConfigError, match="rank is 0"):
        Lora(rank=0).cases()
