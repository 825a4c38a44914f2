"""An `AsyncLLM` around the real engine and a fake executor, and checks for leftovers of its requests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.engine import Engine
from tests.fakes import FakeExecutor, make_engine


def slow(engine, seconds: float = 0.002):
    """The engine with steps that take some time."""
    submit = engine.executor.submit

    def submit_slowly(step):
        time.sleep(seconds)
        return submit(step)

    engine.executor.submit = submit_slowly
    return engine


def serving(engine: Engine | None = None, **settings: Any) -> AsyncLLM:
    """Eight rows, and blocks for all of them, by default."""
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
