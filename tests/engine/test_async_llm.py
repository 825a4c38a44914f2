"""`AsyncLLM` around the real engine and a fake executor: streams and their deltas, refusals, replicas, times."""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest

from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.distributed.replicas import Replica, Replicas
from ksana_jax.engine.engine_thread import StepNews
from ksana_jax.engine.inflight import InflightRequests
from tests.engine.async_serving import assert_idle, serving, settled, slow, tokens
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens


async def test_deltas_of_many_streams_add_up_to_the_tokens_of_each():
    async def read(llm, seed):
        pieces = [o async for o in llm.generate(prompt_of(5, seed), asking(30), delta=True)]
        assert [o.finished for o in pieces] == [False] * (len(pieces) - 1) + [True]
        assert tokens(pieces) == reference_tokens(prompt_of(5, seed), 30, FULLY)

    async with serving() as llm:
        await asyncio.gather(*(read(llm, seed) for seed in range(20)))
        assert_idle(llm)


async def test_outputs_grow_to_the_whole_unless_deltas_are_asked_for():
    async with serving(slow(make_engine())) as llm:
        seen = [o.outputs[0].token_ids async for o in llm.generate(prompt_of(4), asking(12))]
        expected = reference_tokens(prompt_of(4), 12, FULLY)
        assert seen[-1] == expected and len(seen) > 3
        assert all(some == expected[: len(some)] for some in seen)


async def test_a_first_token_arrives_before_the_tokens_of_older_requests():
    engine, inflight, heard, requests = make_engine(), InflightRequests(), [], []
    for name in ("old", "new"):
        requests.append(request := engine.add_request(prompt_of(4), asking(50)))
        inflight.open(request, 0).buffer.listener = functools.partial(heard.append, name)
        engine.step()
    inflight.post(StepNews(0, [request.take_delta() for request in requests], engine.first_tokens))
    await asyncio.sleep(0)
    assert heard == ["new", "old"]


async def test_all_completions_of_a_prompt_arrive():
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


async def test_a_request_without_a_stream_is_reported_at_its_end():
    async with serving() as llm:
        stream = await llm.submit(prompt_of(5), asking(20), streams=False)
        output = await stream.result()
        assert output.outputs[0].token_ids == reference_tokens(prompt_of(5), 20, FULLY)
        with pytest.raises(ValueError, match="has been read"):
            await stream.result()


async def test_a_reader_that_is_slow_gets_one_long_piece():
    async with serving() as llm:
        stream = await llm.submit(prompt_of(5), asking(100), delta=True)
        while llm.stats().num_requests:
            await asyncio.sleep(0.001)
        assert len(stream._mailbox._pieces) < 16
        piece = await anext(stream)
        assert piece.finished and tokens([piece]) == reference_tokens(prompt_of(5), 100, FULLY)
        assert [o async for o in stream] == []


async def test_a_request_that_can_never_be_served_is_refused_before_anything_is_queued():
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


async def test_requests_of_several_replicas_get_their_own_tokens_and_loads_return_to_zero():
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


async def test_a_request_is_timed_from_the_call_to_its_first_step_and_its_first_token():
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
