"""Consistent hashing with bounded loads."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib

from ksana_jax import checks
from ksana_jax.errors import ConfigError
from ksana_jax.router.policies.base import Policy
from ksana_jax.router.request import Hash, RoutedRequest
from ksana_jax.router.view import View


@dataclasses.dataclass
class CHWBL(Policy):
    """Hashes the first blocks of a prompt onto a ring of servers, and walks on past servers with too many requests.

    A server may have bound x the mean number of requests, this one included. A prompt without a full block goes to the
    server with the fewest requests.

    Args:
      bound: of a server's requests, relative to the mean; above 1.
      num_blocks: leading blocks that are hashed. points: of each server on the ring.

    Source: Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, arXiv:1608.01350; the bound of
    1.25 and its use for prompts are KubeAI's.
    """

    bound: float = 1.25
    num_blocks: int = 2
    points: int = 100

    def __post_init__(self) -> None:
        checks.require(
            checks.number("bound", self.bound, above=1),
            checks.integer("num_blocks", self.num_blocks),
            checks.integer("points", self.points),
            error=ConfigError,
        )
        self._points: dict[int, list[tuple[int, int]]] = {}
        self._ring: list[tuple[int, int]] = []

    def added(self, server: int) -> None:
        self._points[server] = [(_point(b"%d/%d" % (server, n)), server) for n in range(self.points)]
        self._ring = []

    def removed(self, server: int, now: float) -> None:
        del self._points[server]
        self._ring = []

    def choose(self, request: RoutedRequest, view: View) -> int:
        requests, closed = view.ledger.requests, view.closed
        if not request.hashes:
            return view.lowest(requests)
        if not self._ring:
            self._ring = sorted(point for points in self._points.values() for point in points)
        ring = self._ring
        limit = self.bound * (float(requests[view.ready].sum()) + 1) / len(view.ready)
        at = bisect.bisect(ring, (_point(request.hashes[: self.num_blocks][-1]), -1))
        for step in range(len(ring)):
            server = ring[(at + step) % len(ring)][1]
            if not closed[server] and requests[server] + 1 <= limit:
                return server
        return view.lowest(requests)


def _point(key: Hash) -> int:
    data = key if isinstance(key, bytes) else b"%d" % key
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
