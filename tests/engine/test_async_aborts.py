"""Requests of `AsyncLLM` that are aborted or left in any state: blocks on all tiers are free again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from ksana_jax.core.request import FinishReason
from ksana_jax.engine.async_llm import AsyncLLM
from tests.engine.async_serving import assert_idle, serving, settled, slow, tokens
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens, run
from tests.kv.disk.double import DiskDouble


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"num_scheduler_steps": 4}])
@pytest.mark.parametrize("at", ["queued", "waiting", "prefill", "decode", "ended"])
async def test_an_abort_in_any_state_frees_the_blocks_within_two_steps(settings, at):
    engine = slow(make_engine(num_blocks=64, max_num_seqs=2, max_model_len=128, **settings))
    async with serving(engine) as llm:
        runs = [llm.engine.add_request(prompt_of(3, s), asking(100)) for s in range(2 if at == "waiting" else 1)]
        background = await llm.submit(prompt_of(3, 9), asking(2))  # wakes the thread
        if at != "waiting":
            await background.result()
        held = llm.stats().blocks_in_use
        stream = await llm.submit(prompt_of(100 if at == "prefill" else 20), asking(20), "x", delta=True)
        if at == "waiting":
            while llm.stats().num_waiting < 2:
                await asyncio.sleep(0.001)
        elif at == "prefill":
            while llm.stats().blocks_in_use < held + 2:
                await asyncio.sleep(0.001)
        elif at == "decode":
            await anext(stream)
        elif at == "ended":
            await stream.result()
        await llm.abort("x")
        steps = len(engine.records)
        assert "x" not in engine.requests
        mine = [seq for seq in engine.scheduler.rows.seqs if seq is not None and seq.request_id == "x"]
        assert not mine and len(engine.records) - steps <= 2
        await llm.abort("x")
        await llm.abort("never there")
        if at != "ended":
            assert (await stream.result()).outputs[0].finish_reason is FinishReason.ABORT
        for request in runs:
            engine.abort(request.request_id)
        background.close()
        await settled(llm)


async def test_an_abort_while_the_disk_reads_its_prefix_lets_go_of_everything():
    disk, prompt = DiskDouble(), prompt_of(20)
    settings: dict[str, Any] = {"caching": True, "host_slots": 16, "disk": disk, "read_timeout_s": 10**9}
    before = make_engine(**settings)
    before.add_request(prompt, asking(1))
    run(before)
    before.flush()
    assert disk.files
    async with AsyncLLM.around(make_engine(**settings)) as llm:
        stream = await llm.submit(prompt, asking(5), "x")
        while not disk.asked:
            await asyncio.sleep(0.001)
        assert llm.stats().num_waiting == 1
        other = await llm.submit(prompt_of(7, 3), asking(5))  # passes the one that waits
        assert (await other.result()).outputs[0].token_ids == reference_tokens(prompt_of(7, 3), 5, FULLY)
        await llm.abort("x")
        assert (await stream.result()).outputs[0].finish_reason is FinishReason.ABORT
        disk.end_all()
        again = await llm.submit(prompt, asking(5))
        disk.answers = True
        while llm.stats().num_requests:
            disk.end_all()
            await asyncio.sleep(0.001)
        assert (await again.result()).outputs[0].token_ids == reference_tokens(prompt, 5, FULLY)
    assert_idle(llm)
    host = llm.engine.memory.host
    assert host is not None and host.pool.num_used == 0


async def test_an_abort_of_a_swapped_request_frees_its_blocks_on_the_host():
    engine = slow(make_engine(num_blocks=10, max_num_seqs=2, host_slots=32, preempt="swap"))
    async with AsyncLLM.around(engine) as llm:
        streams = await llm.submit_all([prompt_of(8, 1), prompt_of(8, 2)], asking(24))
        host = engine.memory.host
        assert host is not None
        while not host.pool.num_used:
            await asyncio.sleep(0.001)
        for stream in streams:
            await llm.abort(stream.request_id)
            assert (await stream.result()).outputs[0].finish_reason is FinishReason.ABORT
    assert engine.scheduler.num_preemptions and host.pool.num_used == 0
    assert_idle(llm)


async def test_cancelling_the_reader_aborts_its_request():
    async with serving(slow(make_engine(max_model_len=128))) as llm:

        async def read():
            async for _ in llm.generate(prompt_of(5), asking(100)):
                pass

        task = asyncio.create_task(read())
        while not llm.stats().blocks_in_use:
            await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await settled(llm)


async def test_a_closed_or_dropped_stream_aborts_its_request():
    async with serving(slow(make_engine(max_model_len=128))) as llm:
        stream = await llm.submit(prompt_of(5), asking(100))
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        assert [o async for o in stream] == []
        await settled(llm)
        stream = await llm.submit(prompt_of(5), asking(100))
        await anext(stream)
        del stream
        gc.collect()
        await settled(llm)


async def test_a_wait_that_times_out_leaves_the_stream_open():
    async with serving(slow(make_engine(), 0.02)) as llm:
        stream = await llm.submit(prompt_of(5), asking(5), delta=True)
        pieces = []
        while True:
            try:
                pieces.append(await asyncio.wait_for(anext(stream), 0.001))
            except TimeoutError:
                continue
            except StopAsyncIteration:
                break
        assert tokens(pieces) == reference_tokens(prompt_of(5), 5, FULLY)
