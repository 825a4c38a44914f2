"""Limits of the queue: what is refused, what never is, and how long to wait."""

from __future__ import annotations

import asyncio
import re

import pytest

from ksana_jax.core.metrics import StepRecord
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.engine_thread import StepNews
from ksana_jax.serve.server.limits import PrefillRate, QueueFull, QueueLimits
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens
from tests.serve.server.serving import slow


def step(began_s: float, ended_s: float, num_tokens: int, num_decodes: int = 0, compiled: bool = False) -> StepRecord:
    return StepRecord(ended_s, num_tokens, num_decodes, 0, 0, 0, 0, 0, began_s=began_s, compiled=compiled)


def rate_of(*records: StepRecord) -> float | None:
    rate = PrefillRate()
    rate.observe(StepNews(0, records=records))
    return rate.tokens_per_s


def engine_of(seconds: float = 0.005):
    engine = make_engine(num_blocks=256, max_num_seqs=2, max_model_len=128)
    slow(engine, seconds)
    return engine


def test_the_rate_is_that_of_steps_with_prefills_and_unknown_at_first():
    busy = [step(i, i + 0.5, 100) for i in range(10)]
    assert rate_of(*busy[:7]) is None
    assert rate_of(*busy) == pytest.approx(200)
    # Neither decodes count, nor the time that the engine is idle, nor steps that were compiled.
    others = [step(i + 0.5, i + 0.9, 64, 64) for i in range(10)]
    assert rate_of(*(r for pair in zip(busy, others, strict=True) for r in pair)) == pytest.approx(200)
    assert rate_of(step(-20, 0, 100, compiled=True), *busy) == pytest.approx(200)
    assert rate_of(*(step(i, i + 0.5, 100, 50) for i in range(10))) == pytest.approx(100)


def test_a_step_submitted_ahead_is_timed_from_the_end_of_the_one_before():
    assert rate_of(*(step(i - 0.9, i + 1, 100) for i in range(10))) == pytest.approx(100, rel=0.1)


def test_the_rate_follows_a_change():
    slower = [step(10 + i, 10 + i + 1, 100) for i in range(300)]
    assert rate_of(*(step(i, i + 0.5, 100) for i in range(10)), *slower) == pytest.approx(100, rel=0.01)


async def test_requests_beyond_the_limit_are_refused_and_those_accepted_go_on():
    async with AsyncLLM.around(engine_of()) as llm:
        limits = QueueLimits(llm, max_num_queued_reqs=5)
        streams = [await llm.submit(prompt_of(5, seed), asking(20), delta=True) for seed in range(3)]
        streams.append(await llm.submit(prompt_of(5, 3), asking(20, n=2), delta=True))  # counts two
        with pytest.raises(QueueFull, match=re.escape("5 sequences wait or run, 1 more make 6")) as raised:
            await llm.submit(prompt_of(5), asking())
        assert raised.value.retry_after_s >= 1 and "max_num_queued_reqs is 5" in str(raised.value)
        assert llm.stats().num_sequences == 5
        for seed, stream in enumerate(streams[:3]):
            output = await stream.result()
            assert output.outputs[0].token_ids == reference_tokens(prompt_of(5, seed), 20, FULLY)
        await streams[3].result()
        await (await llm.submit(prompt_of(5), asking())).result()
        assert limits.max_num_queued_reqs == 5


async def test_requests_that_arrive_together_cannot_pass_a_limit_together():
    async with AsyncLLM.around(engine_of()) as llm:
        QueueLimits(llm, max_num_queued_reqs=4)

        async def ask(seed):
            try:
                return await llm.submit(prompt_of(5, seed), asking())
            except QueueFull:
                return None

        streams = await asyncio.gather(*(ask(seed) for seed in range(50)))
        accepted = [stream for stream in streams if stream is not None]
        assert len(accepted) == 4
        for stream in accepted:
            await stream.result()


async def test_several_prompts_are_accepted_or_refused_together():
    async with AsyncLLM.around(engine_of()) as llm:
        QueueLimits(llm, max_num_queued_reqs=4)
        [stream] = await llm.submit_all([prompt_of(5)], asking())
        with pytest.raises(QueueFull):
            await llm.submit_all([prompt_of(5, seed) for seed in range(4)], asking())
        assert llm.stats().num_requests <= 1
        await stream.result()


async def test_prompt_tokens_that_wait_are_limited_until_their_first_token():
    async with AsyncLLM.around(engine_of()) as llm:
        limits = QueueLimits(llm, max_num_queued_tokens=100)
        first = await llm.submit(prompt_of(90), asking(20), delta=True)
        with pytest.raises(QueueFull, match="90 prompt tokens wait, 11 more make 101, max_num_queued_tokens is"):
            await llm.submit(prompt_of(11), asking())
        await (await llm.submit(prompt_of(10), asking(1))).result()
        await anext(first)  # has its first token: its prompt no longer waits
        assert llm.stats().num_prefill_tokens == 0
        second = await llm.submit(prompt_of(90), asking(1))
        await second.result()
        await first.result()
        assert limits.max_num_queued_tokens == 100


async def test_a_request_beyond_a_limit_by_itself_is_accepted_when_there_is_no_other():
    async with AsyncLLM.around(engine_of()) as llm:
        QueueLimits(llm, max_num_queued_reqs=2, max_num_queued_tokens=10)
        await (await llm.submit(prompt_of(50), asking(3, n=4, temperature=1))).result()
        await (await llm.submit(prompt_of(50), asking(3))).result()


async def test_a_burst_of_a_few_hundred_requests_is_accepted_by_default():
    async with AsyncLLM.around(make_engine(num_blocks=256, max_num_seqs=8, max_model_len=128)) as llm:
        limits = QueueLimits(llm)
        for seed in range(12):  # the rate is known
            await (await llm.submit(prompt_of(5, seed), asking(1))).result()
        assert limits.prefill_tokens_per_s is not None
        limits._rates[0]._seconds = limits._rates[0]._tokens / 500  # a model of billions of parameters on a CPU
        assert limits.prefill_tokens_per_s == 500
        streams = await asyncio.gather(*(llm.submit(prompt_of(100, seed), asking(1)) for seed in range(400)))
        assert len(streams) == 400


async def test_the_limits_follow_from_rows_and_the_measured_rate_by_default():
    async with AsyncLLM.around(engine_of(0)) as llm:
        limits = QueueLimits(llm)
        assert limits.max_num_queued_reqs == 1024
        assert limits.max_num_queued_tokens is None and limits.retry_after_s == 1
        for observe in llm.observers:
            observe(StepNews(0, records=[step(i, i + 1, 4) for i in range(10)]))
        assert limits.prefill_tokens_per_s == pytest.approx(4) and limits.max_num_queued_tokens == 600 * 4
        slow(llm.engine, 0.05)
        streams = await llm.submit_all([prompt_of(10, seed) for seed in range(3)], asking(1))
        assert limits.retry_after_s == 8  # 30 tokens at 4 a second
        for stream in streams:
            stream.close()


def test_a_limit_that_is_no_number_is_refused():
    llm = AsyncLLM.around(engine_of())
    with pytest.raises(ValueError, match="max_num_queued_reqs is 0, must be an integer from 1"):
        QueueLimits(llm, max_num_queued_reqs=0)
    llm.close()
