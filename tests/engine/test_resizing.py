"""Pools of several sizes: tokens and prefixes stay the same, and a size is compiled once."""

import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine import sleeping
from ksana_jax.sharding.placement import Placement
from tests.engine import small
from tests.engine.test_sleeping import GREEDY, PROMPTS, cached, folders, tokens  # noqa: F401  a fixture
from tests.engine.test_sleeping import engine as read_engine


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": True, "host_cache_bytes": 2**20},
        pytest.param({"kv_eviction": {"method": "h2o", "budget": 8}}, marks=pytest.mark.soak),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
        pytest.param({"enable_lora": True}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_tokens_are_the_same_in_pools_of_all_sizes_which_are_compiled_once(settings, folders):  # noqa: F811
    with read_engine(folders[0], **settings) as llm:
        before, compiled = tokens(llm), {24: llm.num_compilations}
        for num_blocks in (12, 24, 12):
            llm.resize_pool(num_blocks)
            measured = llm.memory_usage()["pool"]
            assert measured.predicted == measured.measured == num_blocks * llm.block_bytes
            assert llm.num_blocks == num_blocks and tokens(llm) == before
            llm.engine.memory.check([])
            again = compiled.setdefault(num_blocks, llm.num_compilations)
            moves = 2 * ("host_cache_bytes" in settings)  # functions for blocks to the host, and back
            assert llm.num_compilations <= again + moves


def test_an_engine_that_sleeps_keeps_its_size_if_another_does_not_fit(folders, monkeypatch):  # noqa: F811
    def no_memory(*arguments):
        raise MemoryError("8 GiB")

    with read_engine(folders[0]) as llm:
        expected = tokens(llm)
        llm.sleep()
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match="num_blocks is 12: no memory for a pool"):
            patch.setattr(sleeping, "BlockManager", no_memory)
            llm.resize_pool(12)
        with pytest.raises(ValueError, match=r"num_blocks is 1,099,511,627,776, must be an integer from 1 to 1,07"):
            llm.resize_pool(2**40)
        llm.wake_up()
        assert tokens(llm) == expected and llm.memory_usage()["pool"].measured == 24 * llm.block_bytes


def test_prefixes_survive_and_an_engine_that_sleeps_wakes_with_the_new_pool(folders):  # noqa: F811
    with read_engine(folders[0], enable_prefix_caching=True, host_cache_bytes=2**20) as llm:
        first = tokens(llm)
        llm.resize_pool(12)
        assert cached(llm) == 16
        llm.sleep()
        llm.resize_pool(24)
        assert llm.memory_usage()["pool"].measured == 0
        llm.wake_up()
        assert llm.memory_usage()["pool"].measured == 24 * llm.block_bytes
        assert cached(llm) == 16 and tokens(llm) == first


def test_an_engine_with_requests_keeps_its_pool_and_a_failed_step_too(folders):  # noqa: F811
    with read_engine(folders[0]) as llm:
        expected = tokens(llm)
        stream = llm.stream([{"prompt_token_ids": PROMPTS[0]}], GREEDY)
        next(stream)
        with pytest.raises(RuntimeError, match="1 requests are running: the pool changes only in between"):
            llm.resize_pool(12)
        assert list(stream)[-1].outputs[0].token_ids == expected[0]
        llm.resize_pool(12)
        llm.engine.lock.run(llm.engine._reset, RuntimeError("a failed step"))
        assert llm.num_blocks == 12 and llm.memory_usage()["pool"].measured == 12 * llm.block_bytes
        assert tokens(llm) == expected
        with pytest.raises(ValueError, match="num_blocks is 0"):
            llm.resize_pool(0)
        llm.resize_pool(8)
        with pytest.raises(ValueError, match="need 12 KV blocks of 4 tokens, the pool has 8"):
            llm.generate([5] * 40, SamplingParams(max_tokens=16, ignore_eos=True, detokenize=False))


def test_a_pool_that_does_not_fit_leaves_the_old_one(folders, monkeypatch):  # noqa: F811
    with read_engine(folders[0], enable_prefix_caching=True, host_cache_bytes=2**20) as llm:
        expected, make = tokens(llm), Placement.pool

        def refuse(placement, layout, num_blocks):
            if num_blocks > 24:
                raise MemoryError(f"{num_blocks} blocks")
            return make(placement, layout, num_blocks)

        monkeypatch.setattr(Placement, "pool", refuse)
        said = f"num_blocks is 30: no memory for a pool of {30 * llm.block_bytes:,} bytes: 30 blocks"
        with pytest.raises(ConfigError, match=said):
            llm.resize_pool(30)
        assert llm.num_blocks == 24 and llm.memory_usage()["pool"].measured == llm.memory_plan.pool_bytes
        assert tokens(llm) == expected
        llm.resize_pool(12)
        assert tokens(llm) == expected


def test_an_engine_that_cannot_sleep_cannot_move(folders):  # noqa: F811
    draft = {"method": "draft_model", "model": str(folders[1]), "num_speculative_tokens": 2}
    with read_engine(folders[0], speculative_config=draft) as llm, pytest.raises(ConfigError, match="a draft model"):
        llm.resize_pool(12)
    small.forget_programs()
