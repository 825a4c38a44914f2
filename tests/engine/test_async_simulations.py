"""Random simulations of an AsyncLLM, 25 by default, SIMULATIONS in the soak: no leak."""

from __future__ import annotations

import asyncio
import collections
import gc
import logging
import os
import random
import threading

import pytest

from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.runner.planner.process import resident_bytes
from tests.engine.async_simulations import live
from tests.fakes import asking, make_engine, prompt_of
from tests.soak import soak_unless

# About a minute of one core.
SIMULATIONS = int(os.environ.get("KSANA_SIMULATIONS", 400))


@pytest.mark.parametrize("first", soak_unless(lambda first: first < 25, range(0, SIMULATIONS, 5)))
def test_clients_that_come_and_go_get_what_their_prompts_give_alone(first, caplog):
    caplog.set_level(logging.CRITICAL)  # the steps that fail
    seen = collections.Counter()
    for seed in range(first, first + 5):
        seen.update(live(seed).seen)
    assert seen["read"] or seen["result"]  # five simulations need not have both


@pytest.mark.parametrize("count", soak_unless(lambda count: count < 1000, [400, 10_000]))
def test_streams_that_are_left_leave_nothing_behind(count):
    """Each is read for a while, or not at all, and closed, dropped, cancelled or aborted."""

    async def leave(llm: AsyncLLM, rng: random.Random) -> None:
        how = rng.choice(["close", "drop", "cancel", "abort"])
        stream = await llm.submit(prompt_of(rng.randint(1, 40), rng.randint(0, 9)), asking(80), delta=True)
        if how == "cancel":
            task = asyncio.create_task(stream.result())
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        for _ in range(rng.choice([0, 0, 1, 3])):
            await anext(stream, None)  # a reader that was slow finds all tokens in one delta, and then the end
        if how == "close":
            stream.close()
        elif how == "abort":
            await llm.abort(stream.request_id)

    async def main():
        rng = random.Random(1)
        async with AsyncLLM.around(make_engine(num_blocks=200, max_num_seqs=8, max_model_len=128, caching=True)) as llm:
            before = _num_ours()  # what other tests of this process have left
            running, ours, sizes = set(), [], []
            for _ in range(8):
                for _ in range(count // 8 // 10):
                    await asyncio.gather(*(leave(llm, rng) for _ in range(10)))
                assert await _emptied(llm)
                gc.collect()
                running.add((len(asyncio.all_tasks()), threading.active_count()))
                ours.append(_num_ours())
                llm.engine.executor.steps.clear()  # pyright: ignore[reportAttributeAccessIssue]
                sizes.append(resident_bytes() or 0)
            assert len(running) == 1, running
            assert max(ours) - before < 5 * 10, (before, ours)  # the engine remembers the last step's requests
            assert not llm._open.by_id and not llm._threads[0]._requests and not llm.engine._watched
            assert len(llm.engine.records) <= 2 * 4096
            # What the last half adds to the process is no more than noise: 5,000 requests of 1 KiB would show. Of 200
            # nothing would: what other tests have left allocates, too.
            assert count < 1000 or sizes[-1] - sizes[3] < 4 * 2**20, sizes

    asyncio.run(main())


async def _emptied(llm: AsyncLLM) -> bool:
    for _ in range(2000):
        stats = llm.stats()
        if not (stats.num_requests or stats.blocks_in_use or stats.num_running or stats.num_waiting):
            return True
        await asyncio.sleep(0.001)
    return False


def _num_ours() -> int:
    """Number of objects of requests that are alive."""
    names = {"Request", "Sequence", "Completion", "OutputBuffer", "RequestStream", "InflightRequest", "RequestOutput"}
    return sum(type(thing).__name__ in names for thing in gc.get_objects())
