"""Ends of an `AsyncLLM`: draining, closing, failing steps, a dying engine, an event loop that ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time

import pytest

from ksana_jax.core.request import FinishReason
from ksana_jax.engine.async_llm import NotServing
from tests.engine.async_serving import assert_idle, of, serving, slow, tokens
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens


async def test_draining_ends_what_was_accepted_and_refuses_the_rest():
    async with serving(slow(make_engine(num_blocks=256, max_num_seqs=8, max_model_len=128))) as llm:
        streams = await llm.submit_all([prompt_of(5, seed) for seed in range(12)], asking(30), delta=True)
        leaving = streams.pop()
        draining = asyncio.create_task(llm.drain())
        await asyncio.sleep(0.01)
        assert llm.stats().is_draining
        with pytest.raises(NotServing, match="draining"):
            await llm.submit(prompt_of(5), asking())
        leaving.close()  # a client that leaves meanwhile
        assert await draining
        for seed, stream in enumerate(streams):
            piece = await stream.result()
            assert tokens([piece]) == reference_tokens(prompt_of(5, seed), 30, FULLY)
        assert_idle(llm)


async def test_draining_stops_waiting_in_time_and_closing_ends_the_rest():
    llm = serving(slow(make_engine(max_model_len=128)))
    stream = await llm.submit(prompt_of(5), asking(100))
    assert not await llm.drain(0.02)
    await llm.aclose()
    await llm.aclose()
    assert (await stream.result()).outputs[0].finish_reason is FinishReason.ABORT
    assert not llm.is_alive and llm.error is None
    with pytest.raises(NotServing, match="has been closed"):
        await llm.submit(prompt_of(5), asking())
    assert_idle(llm)


async def test_a_failing_step_ends_its_requests_and_the_engine_goes_on():
    async with serving() as llm:
        for _ in range(6):  # with a good step in between, none of them counts
            of(llm).fails = "as told"
            streams = await llm.submit_all([prompt_of(5, seed) for seed in range(10)], asking(30))
            for stream in streams:
                [completion] = (await stream.result()).outputs
                assert completion.finish_reason is FinishReason.ERROR
                assert completion.error == "Failed: as told"
            assert_idle(llm)
            of(llm).fails = None
            output = await (await llm.submit(prompt_of(5), asking(30))).result()
            assert output.outputs[0].token_ids == reference_tokens(prompt_of(5), 30, FULLY)
        assert llm.is_alive and llm.error is None


async def test_three_failures_in_a_row_kill_the_engine():
    async with serving() as llm:
        of(llm).fails = "as told"
        for number in range(3):
            stream = await llm.submit(prompt_of(5), asking(30))
            assert (await stream.result()).outputs[0].finish_reason is FinishReason.ERROR
            assert number == 2 or llm.is_alive
        while llm.is_alive:
            await asyncio.sleep(0.001)
        assert llm.error == "Failed: as told"
        with pytest.raises(NotServing, match="the engine is dead: Failed: as told"):
            await llm.submit(prompt_of(5), asking())
        assert_idle(llm)


async def test_requests_that_a_dying_engine_never_saw_end_with_the_reason():
    async with serving() as llm:
        of(llm).fails, streams = "as told", []
        with contextlib.suppress(NotServing):
            for _ in range(1000):
                streams.append(await llm.submit(prompt_of(5), asking(30)))
                if len(streams) % 10 == 0:
                    await asyncio.sleep(0)
        for stream in streams:
            [completion] = (await asyncio.wait_for(stream.result(), 5)).outputs
            assert (completion.finish_reason, completion.error) == (FinishReason.ERROR, "Failed: as told")
        assert not llm.stats().num_requests


async def test_a_policy_that_raises_ends_only_the_request_it_was_asked_about():
    def rank(seq):
        raise KeyError("seven")

    async with serving(slow(make_engine())) as llm:  # else the first delta may have all tokens
        good = await llm.submit(prompt_of(5), asking(30), delta=True)
        first = await anext(good)
        llm.engine.scheduler.queue.rank = rank
        bad = await llm.submit(prompt_of(7), asking(30))
        assert (await bad.result()).outputs[0].error == "KeyError: 'seven'"
        assert tokens([first, await good.result()]) == reference_tokens(prompt_of(5), 30, FULLY)


def test_a_second_event_loop_is_refused():
    llm = serving()

    async def one():
        return await (await llm.submit(prompt_of(5), asking(3))).result()

    asyncio.run(one())
    with pytest.raises(RuntimeError, match="serves one event loop"):
        asyncio.run(one())
    llm.close()


def test_threads_end_with_the_event_loop_or_when_the_llm_is_dropped():
    before = set(threading.enumerate())

    async def left_running():
        llm = serving(slow(make_engine(max_model_len=128)))
        await llm.submit(prompt_of(5), asking(100))

    asyncio.run(left_running())
    gc.collect()
    deadline = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not left
