"""`AsyncLLM` around the real engine and a fake executor: streams, aborts, draining, failing steps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from ksana_jax.engine.async_llm import AsyncLLM, NotServing
from ksana_jax.engine.engine import Engine
from ksana_jax.engine.replicas import Replica, Replicas
from ksana_jax.request import FinishReason, RequestOutput
from tests.fakes import FULLY, FakeExecutor, asking, make_engine, prompt_of, reference_tokens


def slow(engine, seconds: float = 0.002):
    """The engine with steps that take some time."""
    submit = engine.executor.submit

    def submit_slowly(step):
        time.sleep(seconds)
        return submit(step)

    engine.executor.submit = submit_slowly
    return engine


def serving(engine: Engine | None = None, **settings: Any) -> AsyncLLM:
    """Eight rows, and blocks for all of them, unless told otherwise."""
    settings = {"num_blocks": 256, "max_num_seqs": 8, "max_model_len": 128, **settings}
    return AsyncLLM.around(engine or make_engine(**settings))


def of(llm: AsyncLLM) -> FakeExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, FakeExecutor)
    return executor


def tokens(pieces: list[RequestOutput], index: int = 0) -> list[int]:
    """Token ids of the deltas of one completion."""
    return [token for piece in pieces for token in piece.outputs[index].token_ids]


async def settled(llm: AsyncLLM) -> None:
    """Waits until nothing is left of any request."""
    for _ in range(1000):
        if not llm.stats().num_requests and not llm.engine.has_work:
            break
        await asyncio.sleep(0.001)
    assert_idle(llm)


def assert_idle(llm: AsyncLLM) -> None:
    stats = llm.stats()
    assert (stats.num_requests, stats.num_sequences, stats.num_prefill_tokens) == (0, 0, 0)
    assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)
    assert not llm._threads[0]._requests and not llm.engine.requests and not llm.engine._watched
    assert [replica.load for replica in llm.replicas.replicas] == [0] * len(llm.replicas.replicas)
    llm.engine.scheduler.check()


def test_deltas_of_many_streams_add_up_to_the_tokens_of_each():
    async def read(llm, seed):
        pieces = [o async for o in llm.generate(prompt_of(5, seed), asking(30), delta=True)]
        assert [o.finished for o in pieces] == [False] * (len(pieces) - 1) + [True]
        assert tokens(pieces) == reference_tokens(prompt_of(5, seed), 30, FULLY)

    async def main():
        async with serving() as llm:
            await asyncio.gather(*(read(llm, seed) for seed in range(20)))
            assert_idle(llm)

    asyncio.run(main())


def test_outputs_grow_to_the_whole_unless_deltas_are_asked_for():
    async def main():
        async with serving(slow(make_engine())) as llm:
            seen = [o.outputs[0].token_ids async for o in llm.generate(prompt_of(4), asking(12))]
            expected = reference_tokens(prompt_of(4), 12, FULLY)
            assert seen[-1] == expected and len(seen) > 3
            assert all(some == expected[: len(some)] for some in seen)

    asyncio.run(main())


def test_all_completions_of_a_prompt_arrive():
    async def main():
        async with serving() as llm:
            asked = asking(9, temperature=1, seed=5, n=3)
            stream = await llm.submit(prompt_of(6), asked, delta=True)
            pieces = [o async for o in stream]
            request = llm.engine.add_request(prompt_of(6), asked)
            while not request.finished:
                await asyncio.sleep(0.001)  # another user of the engine: a sleeping thread is not woken by it
                llm.engine.step()
            for index, completion in enumerate(request.completions):
                assert tokens(pieces, index) == completion.token_ids
            assert len({tuple(c.token_ids) for c in request.completions}) == 3

    asyncio.run(main())


def test_a_request_without_a_stream_is_reported_at_its_end():
    async def main():
        async with serving() as llm:
            stream = await llm.submit(prompt_of(5), asking(20), streams=False)
            output = await stream.result()
            assert output.outputs[0].token_ids == reference_tokens(prompt_of(5), 20, FULLY)
            with pytest.raises(ValueError, match="has been read"):
                await stream.result()

    asyncio.run(main())


def test_a_reader_that_is_slow_gets_one_long_piece():
    async def main():
        async with serving() as llm:
            stream = await llm.submit(prompt_of(5), asking(100), delta=True)
            while llm.stats().num_requests:
                await asyncio.sleep(0.001)
            assert len(stream._mailbox._pieces) < 16
            piece = await anext(stream)
            assert piece.finished and tokens([piece]) == reference_tokens(prompt_of(5), 100, FULLY)
            assert [o async for o in stream] == []

    asyncio.run(main())


def test_a_request_that_can_never_be_served_is_refused_before_anything_is_queued():
    async def main():
        async with serving(max_model_len=32) as llm:
            with pytest.raises(ValueError, match="prompt has 40 tokens, max_model_len is 32"):
                await llm.submit(prompt_of(40), asking())
            with pytest.raises(ValueError, match="prompt has no tokenizer"):
                await llm.submit("text", asking())
            with pytest.raises(ValueError, match="prompt has 40 tokens"):
                await llm.submit_all([prompt_of(4), prompt_of(40)], asking())
            assert_idle(llm)
            await llm.submit(prompt_of(4), asking(20), "mine")
            with pytest.raises(ValueError, match="request id 'mine' is in use"):
                await llm.submit(prompt_of(4), asking(), "mine")

    asyncio.run(main())


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"num_scheduler_steps": 4}])
@pytest.mark.parametrize("at", ["queued", "waiting", "prefill", "decode", "ended"])
def test_an_abort_in_any_state_frees_the_blocks_within_two_steps(settings, at):
    async def main():
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

    asyncio.run(main())


def test_cancelling_the_reader_aborts_its_request():
    async def main():
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

    asyncio.run(main())


def test_a_closed_or_dropped_stream_aborts_its_request():
    async def main():
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

    asyncio.run(main())


def test_a_wait_that_times_out_leaves_the_stream_open():
    async def main():
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

    asyncio.run(main())


def test_draining_ends_what_was_accepted_and_refuses_the_rest():
    async def main():
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

    asyncio.run(main())


def test_draining_stops_waiting_in_time_and_closing_ends_the_rest():
    async def main():
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

    asyncio.run(main())


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on():
    async def main():
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

    asyncio.run(main())


def test_three_failures_in_a_row_kill_the_engine():
    async def main():
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

    asyncio.run(main())


def test_requests_that_a_dying_engine_never_saw_end_with_the_reason():
    async def main():
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

    asyncio.run(main())


def test_a_policy_that_raises_ends_only_the_request_it_was_asked_about():
    def rank(seq):
        raise KeyError("seven")

    async def main():
        async with serving() as llm:
            good = await llm.submit(prompt_of(5), asking(30), delta=True)
            first = await anext(good)
            llm.engine.scheduler.rank = rank
            bad = await llm.submit(prompt_of(7), asking(30))
            assert (await bad.result()).outputs[0].error == "KeyError: 'seven'"
            assert tokens([first, await good.result()]) == reference_tokens(prompt_of(5), 30, FULLY)

    asyncio.run(main())


def test_requests_of_several_replicas_get_their_own_tokens_and_loads_return_to_zero():
    async def main():
        engines = [slow(make_engine(num_blocks=256)) for _ in range(3)]

        class Llm:
            replicas = Replicas([Replica(engine) for engine in engines])

        async with AsyncLLM.around(Llm()) as llm:  # type: ignore[arg-type]  an LLM needs a Runner
            streams = await llm.submit_all([prompt_of(5, seed) for seed in range(30)], asking(20), delta=True)
            assert all(replica.load for replica in llm.replicas.replicas)
            for seed, stream in enumerate(streams):
                if seed % 5 == 0:
                    stream.close()
                else:
                    assert tokens([await stream.result()]) == reference_tokens(prompt_of(5, seed), 20, FULLY)
            await settled(llm)
            assert all(engine.records for engine in engines)

    asyncio.run(main())


def test_a_second_event_loop_is_refused():
    llm = serving()

    async def one():
        return await (await llm.submit(prompt_of(5), asking(3))).result()

    asyncio.run(one())
    with pytest.raises(RuntimeError, match="serves one event loop"):
        asyncio.run(one())
    llm.close()


def test_threads_end_with_the_event_loop_or_when_the_llm_is_dropped():
    before = threading.active_count()

    async def left_running():
        llm = serving(slow(make_engine(max_model_len=128)))
        await llm.submit(prompt_of(5), asking(100))

    asyncio.run(left_running())
    gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.005)
    assert threading.active_count() == before


def test_a_request_is_timed_from_the_call_to_its_first_step_and_its_first_token():
    async def main():
        async with serving(max_num_seqs=1) as llm:
            began = [llm.engine.clock()]
            streams = await llm.submit_all([np.arange(5), np.arange(9)], asking(3))
            for stream in streams:
                metrics = (await stream.result()).metrics
                times = [metrics.arrival_s, metrics.scheduled_s, metrics.first_token_s, metrics.finished_s]
                assert None not in times and began[0] < times[0] and times == sorted(times)
                assert times[1] > began[-1]  # the row is taken until the request before it has ended
                assert metrics.queue_s == times[1] - times[0]
                began.append(times[3])

    asyncio.run(main())
