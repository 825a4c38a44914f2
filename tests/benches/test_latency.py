"""`ksana bench latency`: what its numbers are, on a tiny model."""

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.metrics import StepRecord
from ksana_jax.lab.bench.core import Case
from ksana_jax.lab.bench.latency import Latency, decode_seconds
from tests.engine.small import make_llm


def step(ended_s, num_tokens, num_decodes):
    return StepRecord(ended_s, num_tokens, num_decodes, 0, 0, 0, 0, 0)


def test_a_decode_step_is_the_time_between_steps_in_which_all_rows_decode():
    records = [step(1.0, 9, 1), step(2.0, 2, 2), step(2.5, 2, 2), step(3.5, 2, 2), step(9.0, 1, 1), step(20.0, 2, 2)]
    assert decode_seconds(records, 2) == 0.75  # between the second, third and fourth
    assert decode_seconds(records[:2], 2) is None


def test_times_of_a_batch_fit_together():
    bench = Latency(batch=(1, 3), prompt=(20,), output_tokens=12)
    bench.llm = make_llm()
    for case in bench.cases():
        found = bench.measure(case)
        assert len(bench.llm.records) >= 12 + (case.point["batch"] > 1)
        assert 0 < found["ttft_s"] <= found["ttft_last_s"]
        assert 0 < found["step_s"] and 0 < found["tpot_s"]
        total = bench.llm.records[-1].ended_s - bench.llm.records[0].ended_s
        assert found["tpot_s"] * 11 <= total + 1e-9


def test_counts_are_checked():
    with pytest.raises(ConfigError, match="batch is 0"):
        Latency(batch=(0,)).cases()
    with pytest.raises(ConfigError, match="output_tokens is 1, must be an integer from 2"):
        Latency(output_tokens=1).cases()
    assert Case("", {"batch": 1, "prompt": 2}).name == "batch 1, prompt 2"
