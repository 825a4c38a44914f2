"""Turns of requests while all servers are busy: a queue that is fair to clients. Knows no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable

from ksana_jax.serve.router.fairness import FairQueue
from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.server.errors import APIError


class RequestQueue:
    """Sends as many requests as the servers take at once; the rest wait, ordered by their clients' past service.

    Args:
      settings: num_queued 0 lets every request go at once.
      num_ready: tells how many servers may be chosen.

    Attributes:
      queue: the requests that wait.
    """

    def __init__(self, settings: ProxySettings, num_ready: Callable[[], int]):
        self._settings, self._num_ready = settings, num_ready
        self.queue: FairQueue[asyncio.Future[None]] = FairQueue(max_queued=settings.num_queued)
        self._num_going = 0

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits for the turn of a client's request, and holds it while the context is open.

        Raises:
          APIError: status 429: the queue is full; 408: the turn did not come in time.
        """
        if not self._settings.num_queued:
            yield
            return
        await self._wait(client)
        try:
            yield
        finally:
            self._num_going -= 1
            self.go_on()

    async def _wait(self, client: str) -> None:
        if not len(self.queue) and self._has_room():
            self._num_going += 1
            return
        turn = asyncio.get_running_loop().create_future()
        try:
            self.queue.push(client, turn)
        except queue.Full as error:
            raise APIError(429, str(error), code="queue_full", retry_after_s=1) from None
        self.go_on()
        try:
            async with asyncio.timeout(self._settings.queue_timeout_s):
                await turn
        except BaseException as error:
            if not self.queue.remove(client, turn) and turn.done() and not turn.cancelled():
                self._num_going -= 1  # the turn came as its request left
                self.go_on()
            if isinstance(error, TimeoutError):
                waited = f"waited {self._settings.queue_timeout_s:g} s for a server"
                raise APIError(408, waited, code="queue_timeout", retry_after_s=1) from None
            raise

    def go_on(self) -> None:
        """Gives turns as long as there is room."""
        while self._has_room() and (popped := self.queue.pop()) is not None:
            turn = popped[1]
            if not turn.done():
                self._num_going += 1
                turn.set_result(None)

    def _has_room(self) -> bool:
        # Without a server, requests pass, to be refused.
        return self._num_going < max(self._num_ready(), 1) * self._settings.max_requests_per_server
