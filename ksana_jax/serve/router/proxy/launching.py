"""Servers that the proxy starts itself: keeps them running, wherever a launcher starts them. Knows no processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import NamedTuple, Protocol

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.proxy.fleet import Fleet, Server

log = logging.getLogger("ksana_jax.serve.router.proxy")

# Seconds before a restart; they double while the server does not live for a minute.
FIRST_WAIT_S, LONGEST_WAIT_S, LIVES_S = 1.0, 30.0, 60.0
# Exit code of `ksana serve` for invalid input: a restart would end the same way.
INVALID = 2


class EndedServer(NamedTuple):
    """A server's end: in words, and the exit code, None if unknown."""

    why: str
    code: int | None = None


class Launcher(Protocol):
    """Starts servers, numbered from 0, on this machine or in a cluster."""

    async def start(self, index: int) -> str:
        """Starts a server that is not running; returns its address, at which it may not answer yet."""
        ...

    async def ended(self, index: int) -> EndedServer:
        """Waits for a server's end."""
        ...

    async def stop(self, index: int) -> None:
        """Ends a server in good order, or by force if it takes too long."""
        ...


class Keeper:
    """Starts servers, adds them to the fleet, and starts those again that have ended.

    Args:
      count: number of servers.

    Attributes:
      failed: raises ConfigError once a server cannot start at all.
    """

    def __init__(self, fleet: Fleet, launcher: Launcher, count: int):
        self._fleet, self._launcher, self._count = fleet, launcher, count
        self._indices: dict[str, int] = {}

    async def __aenter__(self) -> Keeper:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep(index)) for index in range(self._count)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*map(self._launcher.stop, range(self._count)), return_exceptions=True)
        if self.failed.done():
            self.failed.exception()

    def keeps(self, server: Server) -> bool:
        """True if it was started here."""
        return server.url in self._indices

    def restart(self, server: Server, timeout_s: float) -> None:
        """Drains a server, stops it when its requests have ended or time is up, and has it started again."""
        self._fleet.drain(server)
        self._tasks.append(asyncio.create_task(self._stop(server, timeout_s)))

    async def _stop(self, server: Server, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while server.carried:
                    await asyncio.sleep(0.05)
        await self._launcher.stop(self._indices[server.url])

    async def _keep(self, index: int) -> None:
        loop, wait_s, cold = asyncio.get_running_loop(), FIRST_WAIT_S, False
        while True:
            began = loop.time()
            try:
                url = await self._launcher.start(index)
                self._indices[url] = index
                server = await self._fleet.add(url, cold=cold)
                ended = await self._launcher.ended(index)
                self._fleet.died(server, ended.why)
                await self._fleet.remove(url)
            except ConfigError as error:
                ended = EndedServer(str(error), INVALID)
            if ended.code == INVALID and not cold:
                if not self.failed.done():
                    self.failed.set_exception(ConfigError(f"servers do not start: {ended.why}"))
                return
            cold = True
            wait_s = FIRST_WAIT_S if loop.time() - began > LIVES_S else wait_s
            log.warning("server %d has ended (%s) and starts again in %g s", index, ended.why, wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
