"""Looks up the models of each server, one of them the same for all, and adapters, whose prefixes have roots of their
own."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import aiohttp

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.proxy.app import Proxy, root_names
from ksana_jax.serve.router.proxy.fleet import Server

log = logging.getLogger("ksana_jax.serve.router.proxy")

TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class _Served(NamedTuple):
    """The report of a server: names of its models, digests of adapters among them, and the model of each other name."""

    names: frozenset[str]
    adapters: dict[str, str]
    roots: dict[str, str]


class SameModel:
    """Compares the names under which servers serve their models. Servers that report none are not compared."""

    def __init__(self, proxy: Proxy):
        self._proxy = proxy
        self._served: dict[Server, _Served] = {}

    async def check(self) -> None:
        """Asks the servers that have become ready since the last call.

        Raises:
          ConfigError: one of them serves another model than the servers before it.
        """
        ready = self._proxy.fleet.router.servers
        self._served = {server: served for server, served in self._served.items() if server.url in ready}
        new = [s for s in self._proxy.fleet.servers.values() if s.url in ready and s not in self._served]
        others = []
        for server, served in zip(new, await asyncio.gather(*map(self._ask, new)), strict=True):
            first = next(((s, known.names) for s, known in self._served.items() if known.names), None)
            if first is not None and served.names and not served.names & first[1]:
                others.append(f"{_listed(served.names)} on {server.name}, {_listed(first[1])} on {first[0].name}")
            self._served[server] = served
        self._tell()
        if others:
            raise ConfigError(f"servers must serve the same model: {'; '.join(others)}")

    def _tell(self) -> None:
        """Tells the reader of prompts which adapters and models are served, and the proxy where."""
        adapters: dict[str, str] = {}
        roots: dict[str, str] = {}
        for served in self._served.values():
            adapters |= served.adapters
            roots |= served.roots
        # Prefixes of one model need no name.
        self._proxy.reader.adapters = adapters if len({*roots.values()}) == 1 else roots | adapters
        self._proxy.names_of = {server.url: served.names for server, served in self._served.items()}

    async def watch(self, every_s: float) -> None:
        """Keeps checking, warns of servers that come later, and asks one of the others for new adapters."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.check()
                if known := [*self._served]:
                    server = self._proxy.fleet.dice.choice(known)
                    self._served[server] = await self._ask(server)
                    self._tell()
            except ConfigError as error:
                log.warning("%s", error)

    async def _ask(self, server: Server) -> _Served:
        try:
            url, headers = server.url + "/v1/models", self._proxy.server_headers
            async with self._proxy.fleet.session.get(url, headers=headers, timeout=TIMEOUT) as got:
                models = (await got.json())["data"]
                digests = {str(model["id"]): model.get("adapter_digest") for model in models}
                adapters = {name: digest for name, digest in digests.items() if isinstance(digest, str)}
                return _Served(frozenset(digests), adapters, root_names(models))
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError):
            return _Served(frozenset(), {}, {})


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))[:120]
