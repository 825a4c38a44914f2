"""The prefixes of `--prefix-file` in the router's table: tokenized once, hashed for each salt that requests have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router import Router, hashes_of
from ksana_jax.serve.router.prefix_file import GivenPrefix
from ksana_jax.serve.router.proxy.reading import RequestReader
from ksana_jax.serve.router.proxy.settings import read_server

log = logging.getLogger("ksana_jax.serve.router.proxy")

# Salts for which prefixes are configured. More clients than that have to find theirs by frequency.
MAX_SALTS = 256
RETRY_S = 1.0


class ConfiguredPrefixes:
    """Configures given prefixes when the first request of a salt arrives: hashes differ between clients' keys.

    Args:
      given: lines of the file.
      addresses: of the servers that lines may name; empty if they are started here, and have no address yet.

    Raises:
      ConfigError: the router has no table of prefixes, or a line names an unknown server or is too short.
    """

    def __init__(self, router: Router, given: Sequence[GivenPrefix], addresses: Sequence[str]):
        router.require_table()
        self._router, self._size = router, router.settings.block_size
        self._ready: list[tuple[np.ndarray, list[str]]] = []  # token ids of full blocks, servers
        self._texts: list[tuple[GivenPrefix, list[str]]] = []
        self._seen: set[tuple[str, str]] = set()
        for prefix in given:
            servers = [_known(server, addresses, prefix.where) for server in prefix.servers]
            if prefix.text is not None:
                self._texts.append((prefix, servers))
            elif len(prefix.token_ids) < self._size:
                raise ConfigError(f"{prefix.where}: {self._too_short(len(prefix.token_ids))}")
            else:
                self._ready.append((np.array(prefix.token_ids, np.int32), servers))

    async def tokenize(self, reader: RequestReader) -> None:
        """Tokenizes the texts, on this machine or by a server once there is one; skips those that are too short."""
        for prefix, servers in self._texts:
            while (ids := await reader.token_ids(prefix.text or "")) is None:
                await asyncio.sleep(RETRY_S)
            # The last token may differ once the text continues.
            if len(ids) - 1 < self._size:
                log.warning("%s is skipped: %s", prefix.where, self._too_short(len(ids)))
            else:
                self._ready.append((ids[:-1], servers))
                self._seen.clear()
        self._texts = []

    def see(self, salt: str, model: str, now: float) -> None:
        """Configures the prefixes for requests with this salt, unless that is done."""
        if (salt, model) in self._seen or len(self._seen) >= MAX_SALTS:
            return
        self._seen.add((salt, model))
        for ids, servers in self._ready:
            self._router.configure_prefix(hashes_of(ids, self._size, salt, model), now, servers)

    def _too_short(self, num_tokens: int) -> str:
        return f"{num_tokens} tokens are no full block of {self._size}"


def _known(server: str, addresses: Sequence[str], where: str) -> str:
    try:
        address = read_server(server)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if address not in addresses:
        known = ", ".join(addresses) or "none, as the servers are started here"
        raise ConfigError(f"{where}: server {address} is not among --servers, which are {known}")
    return address
