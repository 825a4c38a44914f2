"""The servers behind the proxy: their health, the requests that each has, and the router that chooses among them.

A server that a probe finds ready joins the router; one that is dead leaves it at once, with its place in the index and
the ledger, and the requests that it had go elsewhere or end. Lives in one event loop; knows no clients.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import aiohttp
import yarl

from ksana_jax.core.errors import ConfigError, one_line, system_reason
from ksana_jax.serve.router import NoServer, RoutedRequest, Router, RouterSettings
from ksana_jax.serve.router.health import Health, HealthSettings, ServerState
from ksana_jax.serve.router.proxy.settings import ProxySettings

log = logging.getLogger("ksana_jax.serve.router.proxy")

# Other servers, such as vLLM's, have the second path only.
PROBED = ("/ready", "/health")


class Server:
    """One server.

    Args:
      url: its address, by which the router knows it. name: shown in messages and metrics.
      health: decides whether it may be chosen.

    Attributes:
      drained: whether an operator took it out of service.
      probing, following: the tasks that probe it and follow its events.
      trouble: why the last probe did not find it ready; empty if it did.
      carried: time limits of the exchanges that it has; the fleet ends them when it dies.
    """

    def __init__(self, url: str, health: Health, fleet: Fleet):
        self.url, self.health, self._fleet = url, health, fleet
        self.name = url.partition("://")[2]
        self.weight = 0.0
        self.drained = False
        self.trouble = ""
        self.carried: set[asyncio.Timeout] = set()
        self.probing: asyncio.Task | None = None
        self.following: asyncio.Task | None = None
        self.look = asyncio.Event()  # set to probe it now

    @contextlib.contextmanager
    def carrying(self, time_limit: asyncio.Timeout) -> Iterator[None]:
        """Counts an exchange as this server's while the context is open."""
        self.carried.add(time_limit)
        try:
            yield
        finally:
            self.carried.discard(time_limit)

    def request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Any:
        """Sends a request; an async context with the response, as aiohttp's.

        Args:
          path: percent-encoded, and sent as it is.
        """
        url = yarl.URL(self.url + path, encoded=True)
        data = None if body is None else io.BytesIO(body)  # bytes of more than 1 MiB would hold up the event loop
        return self._fleet.session.request(
            method, url, data=data, headers=headers, timeout=self._fleet.no_limit, allow_redirects=False
        )


def what_failed(error: Exception) -> str:
    """Describes a failed request to a server, without the HTTP library's message."""
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, aiohttp.ClientConnectorError):
        return system_reason(error)
    if isinstance(error, aiohttp.ClientResponseError):
        return "its answer is not HTTP"
    return "it closed the connection before the end of its answer"


class Fleet:
    """All servers and their health. `async with` starts and ends the probes.

    Args:
      settings: of the proxy. router_settings, health_settings: of its parts.
      clock: seconds, rising.

    Attributes:
      router: policy, index and ledger; its servers are those that are not dead.
      servers: by URL, dead ones too.
      num_retries: requests that were sent again, by cause. num_broken: streams that ended with an error.
      decision_s: seconds that all choices took.
      on_ready: called with a server that has become ready. on_room: called when there is room for more requests.
      on_served: called with client, prompt tokens computed and output tokens, as they are served; None for no callback.
    """

    def __init__(
        self,
        settings: ProxySettings,
        router_settings: RouterSettings | None = None,
        health_settings: HealthSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.settings, self.clock = settings, clock
        self.router = Router((), settings.policy, router_settings, settings.seed)
        self.health_settings = health_settings or HealthSettings(probe_every_s=settings.probe_s)
        self.servers: dict[str, Server] = {}
        self.num_retries: collections.Counter[str] = collections.Counter()
        self.num_broken = 0
        self.dice = random.Random(settings.seed)
        self.decision_s = 0.0
        self.no_limit = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout_s)
        self._probe_limit = aiohttp.ClientTimeout(total=settings.probe_timeout_s)
        self.on_ready: Callable[[Server], None] = lambda server: None
        self.on_room: Callable[[], None] = lambda: None
        self.on_served: Callable[[str, int, int], None] | None = None

    async def __aenter__(self) -> Fleet:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=10),
            auto_decompress=False,
            skip_auto_headers=("Accept-Encoding", "Content-Type", "User-Agent", "Accept"),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=2**18,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        for server in [*self.servers.values()]:
            await self.remove(server.url)
        await self.session.close()

    # ------------------------------------------------------------------ servers

    async def add(self, url: str, *, cold: bool = False) -> Server:
        """Adds a server and probes it once.

        Args:
          cold: whether its share has to grow slowly once it is ready.

        Raises:
          ConfigError: it is a server already.
        """
        if url in self.servers:
            raise ConfigError(f"server {url} is given twice")
        server = self.servers[url] = Server(url, Health(self.health_settings, cold=cold), self)
        await self._probe(server)
        server.probing = asyncio.create_task(self._keep_probing(server))
        return server

    async def remove(self, url: str) -> None:
        """Forgets a server."""
        server = self.servers[url]
        if server.probing is not None:
            server.probing.cancel()
        self.died(server)
        del self.servers[url]

    def named(self, name: str) -> Server | None:
        """Returns the server of a name or URL."""
        return next((s for s in self.servers.values() if name in (s.name, s.url)), None)

    def drain(self, server: Server) -> None:
        """Sends no more requests to a server until `resume`."""
        server.drained = True
        self._refresh(server)

    def resume(self, server: Server) -> None:
        """Puts a drained server back into service."""
        server.drained = False
        self._refresh(server)
        server.look.set()

    def state(self, server: Server) -> str:
        """Returns one of ready, warming, draining and dead."""
        state = server.health.state(self.clock())
        return (ServerState.DRAINING if server.drained and state is not ServerState.DEAD else state).value

    @property
    def num_ready(self) -> int:
        """Number of servers that may be chosen."""
        return sum(server.weight > 0 for server in self.servers.values())

    def died(self, server: Server, why: str = "") -> None:
        """Marks a server as dead: the router forgets it, and its requests go elsewhere or end.

        Args:
          why: shown with a warning; empty for a server that was removed on purpose.
        """
        server.health.gone()
        if server.url in self.router.servers:
            if why:
                log.warning("server %s is dead: %s", server.name, one_line(why))
            self.router.remove(server.url, self.clock())
        if server.following is not None:
            server.following.cancel()
        server.weight = 0.0
        now = asyncio.get_running_loop().time()
        for limit in server.carried:
            with contextlib.suppress(RuntimeError):  # it has just ended
                limit.reschedule(now)

    def _weight(self, server: Server) -> float:
        return 0.0 if server.drained else server.health.weight(self.clock())

    def _refresh(self, server: Server) -> None:
        """Passes a server's new health to the router."""
        if server.health.state(self.clock()) is ServerState.DEAD:
            self.died(server, f"no answer to {self.health_settings.max_missed} probes")
            return
        if server.url not in self.router.servers:
            log.info("server %s is ready", server.name)
            self.router.add_server(server.url)
            server.weight = 1.0
            self.on_ready(server)
        weight = self._weight(server)
        if weight != server.weight:
            rises = weight > server.weight
            server.weight = weight
            self.router.set_weight(server.url, weight)
            if rises:
                self.on_room()

    # ------------------------------------------------------------------ health

    async def _keep_probing(self, server: Server) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.look.wait(), self.settings.probe_s)
            server.look.clear()
            await self._probe(server)

    async def _probe(self, server: Server) -> None:
        try:
            found: bool | None = await self._is_ready(server)
            server.trouble = "" if found else "it answers that it is not"
        except aiohttp.ClientConnectorError as error:
            # Connection refused: no need to ask again.
            server.trouble = system_reason(error)
            self.died(server, server.trouble)
            return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            server.trouble = what_failed(error)
            found = None
        server.health.probe(found, self.clock())
        self._refresh(server)

    async def _is_ready(self, server: Server) -> bool:
        for path in PROBED:
            async with self.session.get(server.url + path, timeout=self._probe_limit, allow_redirects=False) as got:
                if got.status != 404:
                    return got.status == 200
        return False

    # ------------------------------------------------------------------ requests

    def choose(self, routed: RoutedRequest, tried: Collection[str]) -> Server:
        """Chooses a server and enters the request into the ledger; raises NoServer if none is left."""
        if not self.router.servers:
            raise NoServer("no server is healthy")
        began = time.perf_counter()
        server = self.servers[self.router.choose(routed, self.clock(), tried)]  # pyright: ignore[reportArgumentType]
        self.decision_s += time.perf_counter() - began
        if self.on_served is not None:
            self.on_served(routed.client, routed.num_prompt - self.router.ledger.live[routed.request_id].matched, 0)
        return server

    def progress(self, routed: RoutedRequest, num_tokens: int) -> None:
        """Records output tokens of a request; the first end its prefill."""
        self.router.progress(routed.request_id, num_tokens, self.clock())
        if self.on_served is not None:
            self.on_served(routed.client, 0, num_tokens)

    def finished(self, routed: RoutedRequest, cached_tokens: int | None) -> None:
        """Takes a request out of the ledger, however it ended."""
        live = self.router.ledger.live.get(routed.request_id)
        if self.on_served is not None and live is not None and cached_tokens is not None:
            self.on_served(routed.client, live.matched - cached_tokens, 0)
        self.router.finished(routed.request_id, self.clock(), cached_tokens)

    def suspect(self, server: Server) -> None:
        """Probes a server at once, after a request failed there. Only the probe decides the server's health."""
        server.look.set()
