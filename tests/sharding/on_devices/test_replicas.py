"""Replicas of an engine on devices of their own: the tokens of one engine, wherever a request goes."""

import functools

import jax
import pytest

from ksana_jax import LLM
from ksana_jax.core.config import ConfigError
from tests.sharding.on_devices.engines import GREEDY, MODELS, PROMPTS, SETTINGS, alone, asked, params_of, tokens_of

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("quick_compiles")]
MIXED_FEW = [GREEDY, asked(temperature=1.0, seed=1)] * 3
ONE_SHAPE = {"max_num_batched_tokens": 2, "query_tile": 1, "max_num_seqs": 2, "dtype": "f32"}


@functools.cache
def two(tensor_parallel_size: int = 1) -> LLM:
    settings = SETTINGS | ONE_SHAPE | {"data_parallel_size": 2, "tensor_parallel_size": tensor_parallel_size}
    return LLM.from_params(MODELS["GQA"], params_of("GQA"), **settings, enable_prefix_caching=True)


def served(llm: LLM) -> list[int]:
    """Steps of each replica since the last call."""
    counts = [len(engine.records) for engine in llm.replicas.engines]
    assert len(llm.records) == sum(counts)
    llm.clear_records()
    return counts


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_tokens_are_those_of_one_engine(tensor_parallel_size):
    llm = two(tensor_parallel_size)
    devices = [engine.executor.cache.kv.sharding.device_set for engine in llm.replicas.engines]
    assert devices == [set(jax.devices()[i * tensor_parallel_size :][:tensor_parallel_size]) for i in range(2)]
    weights = [engine.executor.params.final_norm.sharding.device_set for engine in llm.replicas.engines]
    assert weights == devices
    served(llm)
    for params in (MIXED_FEW, asked(n=2, temperature=1.0, seed=3))[::tensor_parallel_size]:
        assert tokens_of(llm, params) == tokens_of(alone("GQA"), params)
        assert min(served(llm)) > 0
    assert llm.replicas.engines[0].factory is llm.replicas.engines[1].factory  # draws seeds as one engine does
    assert [replica.load for replica in llm.replicas.replicas] == [0, 0]
    assert llm.replicas.num_requests == 0


def test_a_prompt_goes_where_its_prefix_is():
    llm = two()
    for _ in range(2):
        outputs = [llm.generate(PROMPTS[3], GREEDY)[0] for _ in range(3)]
    assert outputs[-1].num_cached_tokens == 32
    served(llm)
    llm.generate(PROMPTS[3], GREEDY)
    assert 0 in served(llm)


def test_a_failing_replica_ends_its_own_requests_only(monkeypatch):
    llm = two()
    broken = llm.replicas.engines[1]
    ids = {True: [], False: []}
    with monkeypatch.context() as patched:
        patched.setattr(broken.executor, "run", lambda step: (_ for _ in ()).throw(FloatingPointError("broken")))
        with pytest.raises(FloatingPointError, match="broken"):
            for output in llm.stream(PROMPTS, GREEDY):
                ids[output.finished].append(output.request_id)
    assert 0 < len(ids[True]) < len(PROMPTS) and llm.replicas.num_requests == 0
    assert [replica.load for replica in llm.replicas.replicas] == [0, 0]
    assert tokens_of(llm, GREEDY) == tokens_of(alone("GQA"), GREEDY)


def test_a_reader_that_stops_aborts_the_requests_of_all_replicas():
    llm = two()
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    assert llm.replicas.num_requests == 0 and [replica.load for replica in llm.replicas.replicas] == [0, 0]
    assert all(not engine.has_work for engine in llm.replicas.engines)
    assert tokens_of(llm, GREEDY) == tokens_of(alone("GQA"), GREEDY)


def test_patterns_change_in_all_replicas():
    llm = two()
    llm.set_pattern({"window": 6})
    one = alone("GQA")
    one.set_pattern({"window": 6})
    try:
        assert tokens_of(llm, GREEDY) == tokens_of(one, GREEDY)
    finally:
        for each in (llm, one):
            each.set_pattern(None)


def test_too_few_devices_are_one_clear_error():
    settings = SETTINGS | ONE_SHAPE | {"data_parallel_size": 3, "tensor_parallel_size": 4}
    with pytest.raises(ConfigError, match=r"data_parallel_size 3 x tensor_parallel_size 4 .* 8 devices .*count=12"):
        LLM.from_params(MODELS["MHA"], params_of("MHA"), **settings)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_replicas_sleep_and_take_weights_each_on_its_devices(tensor_parallel_size):
    llm = two(tensor_parallel_size)
    before = tokens_of(llm, MIXED_FEW)
    llm.sleep(1)
    llm.wake_up()
    assert tokens_of(llm, MIXED_FEW) == before
    llm.sleep(2)
    llm.update_weights(params_of("GQA"))
    devices = [engine.executor.params.final_norm.sharding.device_set for engine in llm.replicas.engines]
    assert devices == [engine.executor.cache.kv.sharding.device_set for engine in llm.replicas.engines]
    assert tokens_of(llm, MIXED_FEW) == before
