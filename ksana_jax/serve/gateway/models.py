"""Looks up each server's model: all must serve the same one."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.gateway.app import Proxy
from ksana_jax.serve.gateway.fleet import Server

log = logging.getLogger("ksana_jax.serve.gateway")

TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class SameModel:
    """Compares the names under which servers serve their models. Servers that report none are not compared."""

    def __init__(self, proxy: Proxy):
        self._proxy = proxy
        self._names: dict[Server, frozenset[str]] = {}

    async def check(self) -> None:
        """Asks the servers that have become ready since the last call.

        Raises:
          ConfigError: one of them serves another model than the servers before it.
        """
        ready = self._proxy.fleet.router.servers
        self._names = {server: names for server, names in self._names.items() if server.url in ready}
        new = [s for s in self._proxy.fleet.servers.values() if s.url in ready and s not in self._names]
        others = []
        for server, names in zip(new, await asyncio.gather(*map(self._ask, new)), strict=True):
            first = next(((s, known) for s, known in self._names.items() if known), None)
            if first is not None and names and not names & first[1]:
                others.append(f"{_listed(names)} on {server.name}, {_listed(first[1])} on {first[0].name}")
            self._names[server] = names
        if others:
            raise ConfigError(f"servers must serve the same model: {'; '.join(others)}")

    async def watch(self, every_s: float) -> None:
        """Keeps checking, and warns of servers that come later."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.check()
            except ConfigError as error:
                log.warning("%s", error)

    async def _ask(self, server: Server) -> frozenset[str]:
        try:
            url, headers = server.url + "/v1/models", self._proxy.server_headers
            async with self._proxy.fleet.session.get(url, headers=headers, timeout=TIMEOUT) as got:
                return frozenset(str(model["id"]) for model in (await got.json())["data"])
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError):
            return frozenset()


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))[:120]
