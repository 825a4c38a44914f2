"""Puts an LLM to sleep when it has had no request for a while, and wakes it up for the next one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ksana_jax.engine.llm import LLM

logger = logging.getLogger("ksana_jax")


class NotServing(RuntimeError):
    """New requests are refused: the engine sleeps, is draining, closed or dead; the message says which and why."""


class IdleSleep:
    """For the tasks of one event loop.

    Args:
      after_s: seconds without a request after which the LLM sleeps; at most as many more may pass.
      level: of `LLM.sleep`.
      is_busy: whether requests are open.
    """

    def __init__(self, llm: LLM, after_s: float, level: int, is_busy: Callable[[], bool]):
        self._llm, self._after_s, self._level, self._is_busy = llm, after_s, level, is_busy
        self._num_users, self._changing = 0, asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False
        self._task: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Wakes the LLM up, and keeps it awake inside.

        Raises:
          NotServing: it cannot wake up.
        """
        self._num_users += 1
        try:
            async with self._changing:
                if self._llm.is_sleeping:
                    try:
                        await _timed("woke up", self._llm.wake_up)
                    except Exception as error:
                        raise NotServing(f"the model cannot wake up: {error}") from error
            yield
        finally:
            self._num_users -= 1
            self.start()

    def start(self) -> None:
        """Counts the seconds from now on."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._due)

    def end(self) -> None:
        """Leaves the LLM as it is from now on; from any thread."""
        self._has_ended = True

    def _due(self) -> None:
        if self._num_users or self._is_busy():
            self.start()
        elif not self._has_ended:
            self._task = asyncio.create_task(self._sleep())

    async def _sleep(self) -> None:
        async with self._changing:
            if self._num_users or self._is_busy() or self._has_ended or self._llm.is_sleeping:
                return
            try:
                await _timed("sleeps", lambda: self._llm.sleep(self._level))
            except RuntimeError:  # somebody else uses it, in a thread
                self.start()


async def _timed(what: str, change: Callable[[], None]) -> None:
    began = time.perf_counter()
    await asyncio.to_thread(change)
    logger.info("the model %s (%.2f s)", what, time.perf_counter() - began)
