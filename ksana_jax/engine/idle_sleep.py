"""Puts an LLM to sleep when it has had no request for a while or others need its memory, and wakes it up again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from ksana_jax.core.sources import display_name
from ksana_jax.engine.model_memory import ModelMemoryManager, footprint

if TYPE_CHECKING:
    from ksana_jax.engine.llm import LLM

logger = logging.getLogger("ksana_jax")


class NotServing(RuntimeError):
    """New requests are refused: the engine sleeps, is draining, closed or dead; the message says which and why."""


class IdleSleep:
    """For the tasks of one event loop; a `model_memory.ManagedModel`.

    Args:
      after_s: seconds without a request after which the LLM sleeps; at most as many more may pass. None keeps it awake.
      level: of `LLM.sleep`.
      is_busy: whether requests are open.
      model_memory: the budget that it shares with others, for whom it sleeps too; None for none.

    Attributes:
      moves_s: seconds in which it fell asleep and woke up.
    """

    moves_s = 0.0

    def __init__(
        self,
        llm: LLM,
        after_s: float | None,
        level: int,
        is_busy: Callable[[], bool],
        model_memory: ModelMemoryManager | None = None,
    ):
        self._llm, self._after_s, self._level, self._is_busy = llm, after_s, level, is_busy
        self._num_users, self._changing = 0, asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self.has_ended = False
        self._task: asyncio.Task[bool] | None = None
        self.name, self.size, self._model_memory = display_name(llm.name), footprint(llm, level), model_memory
        if model_memory is not None:
            model_memory.used(self)

    @contextlib.asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Wakes the LLM up, and keeps it awake inside.

        Raises:
          NotServing: it cannot wake up.
        """
        if self._model_memory is not None:
            await self._model_memory.turn(self)
        self._num_users += 1
        try:
            async with self._changing:
                if self._llm.is_sleeping:
                    try:
                        await self._wake()
                    except Exception as error:
                        raise NotServing(f"the model cannot wake up: {error}") from error
            if self._model_memory is not None:
                self._model_memory.used(self)
            yield
        finally:
            self._num_users -= 1
            self.start()

    async def _wake(self) -> None:
        if self._model_memory is None:
            return await self._timed("woke up", self._llm.wake_up)
        async with self._model_memory.room(self):
            await self._timed("woke up", self._llm.wake_up)

    def start(self) -> None:
        """Counts the seconds from now on."""
        if self._timer is not None:
            self._timer.cancel()
        if self._after_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._due)

    def end(self) -> None:
        """Leaves the LLM as it is from now on; from any thread."""
        self.has_ended = True

    @property
    def is_asleep(self) -> bool:
        return self._llm.is_sleeping

    @property
    def is_idle(self) -> bool:
        return not (self._num_users or self._is_busy() or self.has_ended)

    def _due(self) -> None:
        if self.is_idle:
            self._task = asyncio.create_task(self.rest())
        elif not self.has_ended:
            self.start()

    async def rest(self) -> bool:
        """Sleeps, unless it is not idle; returns whether it sleeps."""
        if not self.is_idle:  # who uses it may hold the lock for long
            return False
        async with self._changing:
            if self._llm.is_sleeping or not self.is_idle:
                return self._llm.is_sleeping
            try:
                await self._timed("sleeps", lambda: self._llm.sleep(self._level))
            except RuntimeError:  # another thread uses it
                self.start()
            return self._llm.is_sleeping

    async def _timed(self, what: str, change: Callable[[], None]) -> None:
        began = time.perf_counter()
        changing = asyncio.ensure_future(asyncio.to_thread(change))
        try:
            await asyncio.shield(changing)
        except asyncio.CancelledError:  # who asked has left, and the locks stay taken until the thread is done
            await asyncio.wait((changing,))
            raise
        seconds = time.perf_counter() - began
        self.moves_s += seconds
        logger.info("model %s %s (%.2f s)", self.name, what, seconds)
