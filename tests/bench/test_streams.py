"""`ksana bench streams` with a model that compiles in seconds."""

import pytest

from ksana_jax.bench.core import Case
from ksana_jax.bench.streams import ASYNC, BLOCKING, OFFLINE, Streams
from ksana_jax.errors import ConfigError
from tests.engine.small import Letters, assert_idle, make_llm


def test_every_way_generates_the_same_number_of_tokens():
    bench = Streams(streams=(4,), prompt=5, output_tokens=6)
    assert [case.label for case in bench.cases()] == [OFFLINE, BLOCKING, ASYNC]
    bench.llm = make_llm(Letters())
    found = {case.label: bench.measure(case) for case in bench.cases()}
    assert all(values["tokens_per_s"] > 0 for values in found.values())
    assert 0 < found[ASYNC]["pieces_per_token"] <= 1 and found[ASYNC]["loop_s"] > 0
    for way in (bench._offline, bench._blocking):
        prompts, params = bench._requests(4)
        assert way(prompts, params) == (24, {})
    assert_idle(bench.llm)


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="streams is 0"):
        Streams(streams=(0,)).cases()
    assert Case(ASYNC, {"streams": 2}).name == "AsyncLLM, streams 2"
