"""An idle LLM goes to sleep, and the next request wakes it up."""

import asyncio

import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.async_llm import AsyncLLM, NotServing
from tests.engine.small import make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
PROMPT = {"prompt_token_ids": list(range(3, 23))}
AFTER_S = 0.05


async def ask(served: AsyncLLM, params: SamplingParams = GREEDY) -> list[int]:
    async for output in served.generate(PROMPT, params):
        last = output
    return last.outputs[0].token_ids


async def until_asleep(llm: LLM) -> None:
    async with asyncio.timeout(20):
        while not llm.is_sleeping:
            await asyncio.sleep(0.01)


def test_it_sleeps_between_requests_and_gives_the_same_tokens():
    with make_llm() as llm:
        expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids

        async def run():
            async with AsyncLLM.around(llm) as served:
                served.sleep_when_idle(AFTER_S)
                for _ in range(3):
                    await until_asleep(llm)
                    assert await asyncio.gather(*(ask(served) for _ in range(4))) == [expected] * 4

        asyncio.run(run())


def test_it_stays_awake_while_a_request_runs_and_inside_awake():
    with make_llm() as llm:

        async def run():
            async with AsyncLLM.around(llm) as served:
                served.sleep_when_idle(AFTER_S)
                stream = await served.submit(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False))
                async for _ in stream:
                    await asyncio.sleep(AFTER_S)
                    assert not (llm.is_sleeping and served.stats().num_requests)
                await until_asleep(llm)
                async with served.awake():
                    await asyncio.sleep(4 * AFTER_S)
                    assert not llm.is_sleeping
                await until_asleep(llm)

        asyncio.run(run())


def test_a_closed_one_leaves_the_llm_as_it_is():
    with make_llm() as llm:

        async def run():
            async with AsyncLLM.around(llm) as served:
                served.sleep_when_idle(AFTER_S)
                await ask(served)
            await asyncio.sleep(3 * AFTER_S)

        asyncio.run(run())
        assert not llm.is_sleeping


def test_an_engine_that_cannot_sleep_says_so_at_once(tmp_path):
    async def run(llm):
        async with AsyncLLM.around(llm) as served:
            served.sleep_when_idle(AFTER_S)

    with make_llm() as llm, pytest.raises(ConfigError, match="an engine without an LLM cannot sleep"):
        asyncio.run(run(llm.engine))


def test_a_request_that_cannot_wake_it_up_gets_the_reason():
    with make_llm() as llm:

        async def run():
            async with AsyncLLM.around(llm) as served:
                served.sleep_when_idle(AFTER_S, level=2)
                await until_asleep(llm)
                with pytest.raises(NotServing, match="the model cannot wake up: the weights were given in memory"):
                    await ask(served)

        asyncio.run(run())
