"""Sends the requests of a workload at fixed times, however slow the answers are (open loop).

A sender that waited for answers would send less to a slow server, and measure it in better conditions than its clients
have ("coordinated omission"). Knows no server and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol

import numpy as np

from ksana_jax.serve.workload.items import WorkItem, Workload
from ksana_jax.serve.workload.report import RequestTimes

# Seconds that prompts are made before they are sent.
_AHEAD_S = 2.0


class RequestFailed(Exception):
    """A request has no complete answer; the message names the cause, equal for equal failures."""


@dataclasses.dataclass
class Arriving:
    """The answer of a request while it arrives.

    Attributes:
      pieces_s: when each piece came. num_output: tokens so far. num_cached: prompt tokens taken from a prefix cache.
    """

    clock: Callable[[], float]
    pieces_s: list[float] = dataclasses.field(default_factory=list)
    num_output: int = 0
    num_cached: int = 0

    def piece(self, num_tokens: int = 1) -> None:
        """Records the arrival of tokens."""
        self.pieces_s.append(self.clock())
        self.num_output += num_tokens


class LoadTarget(Protocol):
    """A target of requests."""

    def prepare(self, item: WorkItem) -> Any:
        """Returns a request that is ready to be sent."""
        ...

    async def send(self, prepared: Any, arriving: Arriving) -> None:
        """Sends a request and receives its answer.

        Raises:
          RequestFailed: it has no complete answer.
        """
        ...


class Sent(NamedTuple):
    """A workload that was sent. times: by index. lags_s: how late each request was sent."""

    times: list[RequestTimes]
    lags_s: np.ndarray


async def send_all(
    workload: Workload,
    target: LoadTarget,
    *,
    max_concurrency: int | None = None,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Sent:
    """Sends all requests and waits for their answers.

    Times count from when a request was due: its arrival, or for a later turn of a session, its think
    time after the answer before; with max_concurrency, not before there is room for it.

    Args:
      max_concurrency: maximum open requests; further ones wait with the sender. None sends all in time.
      timeout_s: time after which a request fails.
    """
    return await _Sender(workload, target, max_concurrency, timeout_s, clock).run()


class _Sender:
    def __init__(
        self,
        workload: Workload,
        target: LoadTarget,
        max_concurrency: int | None,
        timeout_s: float | None,
        clock: Callable[[], float],
    ):
        self._items, self._target, self._timeout_s, self._clock = workload.items, target, timeout_s, clock
        self._room = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._limited = max_concurrency is not None
        self._later: dict[int, list[WorkItem]] = {}
        for item in self._items:
            if item.after is not None:
                self._later.setdefault(item.after, []).append(item)
        self._times: list[RequestTimes | None] = [None] * len(self._items)
        self._lags: list[float] = [0.0] * len(self._items)

    async def run(self) -> Sent:
        first = [item for item in self._items if item.after is None]
        prepared = {item.index: self._target.prepare(item) for item in first if item.arrival_s < _AHEAD_S}
        gc.collect()
        gc.freeze()  # collecting older objects would stop the sender for milliseconds
        try:
            async with asyncio.TaskGroup() as tasks:
                began = self._clock()
                for item in first:
                    await self._until(began + item.arrival_s - _AHEAD_S)
                    one = self._one(item, began + item.arrival_s, prepared.pop(item.index, None), tasks)
                    tasks.create_task(one)
        finally:
            gc.unfreeze()
        assert None not in self._times
        return Sent(self._times, np.array(self._lags))  # pyright: ignore[reportArgumentType]

    async def _until(self, time_s: float) -> None:
        if (wait := time_s - self._clock()) > 0:
            await asyncio.sleep(wait)

    async def _one(self, item: WorkItem, due_s: float, prepared: Any, tasks: asyncio.TaskGroup) -> None:
        """Sends a request when it is due, and the turns after it when it has ended."""
        prepared = self._target.prepare(item) if prepared is None else prepared
        await self._until(due_s)
        async with self._room:
            sent_s = self._clock()
            due_s = sent_s if self._limited else due_s
            self._lags[item.index] = sent_s - due_s
            arriving = Arriving(self._clock)
            error = await self._outcome(self._target.send(prepared, arriving), arriving)
        now = self._clock()
        pieces = arriving.pieces_s
        self._times[item.index] = RequestTimes(
            item.index,
            due_s,
            pieces[0] if pieces else math.nan,
            now if error is not None or not pieces else pieces[-1],
            item.num_prompt,
            arriving.num_output,
            arriving.num_cached,
            np.diff(pieces).tolist(),
            error,
            item.client,
        )
        for turn in self._later.get(item.index, ()):
            tasks.create_task(self._one(turn, now + turn.think_s, None, tasks))

    async def _outcome(self, sending: Coroutine[Any, Any, None], arriving: Arriving) -> str | None:
        """Returns the failure of a request, or None."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await sending
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except RequestFailed as error:
            return str(error)
        return None if arriving.num_output else "empty answer"
