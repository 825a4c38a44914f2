"""Follows the events of the servers' prefix caches (`GET /kv_events`), for an exact index."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from ksana_jax.serve.router import AllBlocksCleared, BlockRemoved, BlockStored
from ksana_jax.serve.router.proxy.fleet import Fleet, Server
from ksana_jax.serve.router.proxy.reading import RequestReader

log = logging.getLogger("ksana_jax.serve.router.proxy")

# A silent connection is dead: a server sends a comment every 15 s.
SILENCE_S = 45.0
WAIT_S = 1.0
CACHE = "cache"  # name of the event that describes the cache
KINDS = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved, "AllBlocksCleared": AllBlocksCleared}


class Mismatch(RuntimeError):
    """The events of a server cannot be used; the message says why."""


class EventFollower:
    """Reads the events of servers and hands them to the router.

    A server whose events do not fit stays with the approximate index, and a warning says so.

    Args:
      reader: learns the model's fingerprint, which is part of the hashes.
      headers: of the requests to servers.

    Attributes:
      num_batches: batches applied.
    """

    def __init__(self, fleet: Fleet, reader: RequestReader, headers: dict[str, str]):
        self._fleet, self._reader, self._headers = fleet, reader, headers
        self.num_batches = 0
        fleet.on_ready = self._begin

    def _begin(self, server: Server) -> None:
        server.following = asyncio.create_task(self._follow(server))

    async def _follow(self, server: Server) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                limit = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=SILENCE_S)
                async with self._fleet.session.get(
                    server.url + "/kv_events", headers=self._headers, timeout=limit
                ) as got:
                    try:
                        if got.status != 200:
                            raise Mismatch(f"status {got.status}: {(await got.text())[:200]}")
                        async for name, data in server_sent_events(got.content):
                            if data == "[DONE]" or data.startswith('{"error"'):
                                break  # the server shuts down
                            self._take(server, name, data)
                    except (Mismatch, ValueError, KeyError, TypeError) as error:
                        log.warning("server %s: its cache is only estimated: %s", server.name, error)
                        return
            await asyncio.sleep(WAIT_S)

    def _take(self, server: Server, name: str, data: str) -> None:
        """Takes the description of a cache, or a batch of its changes."""
        read = json.loads(data)
        if name == CACHE:
            return self._compare(server, read)
        self._fleet.router.events(server.url, map(read_event, read["events"]))
        self.num_batches += 1
        return None

    def _compare(self, server: Server, cache: dict[str, Any]) -> None:
        size = self._fleet.router.settings.block_size
        if cache["block_size"] != size:
            raise Mismatch(f"its block_size is {cache['block_size']}, the router's is {size}: see --block-size")
        if self._reader.model not in ("", cache["model"]):
            raise Mismatch("it serves another model, or with settings that change keys and values")
        self._reader.model = cache["model"]


def read_event(event: dict[str, Any]) -> Any:
    """Returns an event of JSON as one of `serve.router.events`."""
    fields = {name: value for name, value in event.items() if name != "type"}
    if "block_hashes" in fields:
        fields["block_hashes"] = [bytes.fromhex(key) for key in fields["block_hashes"]]
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = bytes.fromhex(fields["parent_block_hash"])
    return KINDS[event["type"]](**fields)


async def server_sent_events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, str]]:
    """Yields (event name, data) of each event with data."""
    buffer = b""
    async for chunk in content.iter_any():
        buffer += chunk
        *events, buffer = buffer.split(b"\n\n")
        for event in events:
            fields: dict[str, str] = {}
            for line in event.decode().split("\n"):
                name, _, value = line.partition(": ")
                fields[name] = value
            if "data" in fields:
                yield fields.get("event", ""), fields["data"]
