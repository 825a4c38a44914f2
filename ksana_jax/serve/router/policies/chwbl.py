"""Consistent hashing with bounded loads."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import math

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.policies.base import Policy
from ksana_jax.serve.router.request import Hash, RoutedRequest
from ksana_jax.serve.router.view import FleetView


@dataclasses.dataclass
class CHWBL(Policy):
    """Hashes the first blocks of a prompt onto a ring of servers, and walks on past servers with too many requests.

    A server may have bound x the mean number of requests, this one included, rounded up. A prompt without a full block
    goes to the server with the fewest requests.

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
        self._of_server: dict[int, np.ndarray] = {}  # its points
        self._points: list[int] = []  # the ring, ascending, made when it is needed; a list, which bisect reads faster
        self._servers = np.zeros(0, np.int64)

    def added(self, server: int) -> None:
        self._of_server[server] = np.array([_point(b"%d/%d" % (server, n)) for n in range(self.points)], np.uint64)
        self._points = []

    def removed(self, server: int, now: float) -> None:
        del self._of_server[server]
        self._points = []

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        requests, num_ready = view.ledger.requests, len(view.ready)
        if not request.hashes:
            return view.lowest(requests)
        if not self._points:
            self._make_ring()
        total = len(view.ledger.live) if view.all_ready else float(requests[view.ready].sum())
        most = math.ceil(self.bound * (total + 1) / num_ready) - 1
        ring = self._servers
        at = bisect.bisect_left(self._points, _point(request.hashes[: self.num_blocks][-1])) % len(ring)
        first = int(ring[at])
        if requests[first] <= most and not view.closed[first]:
            return first
        open_ = requests + view.closed <= most
        # The bound is above the mean, so that some server is open: mostly a near one, but in a full fleet a far one.
        for part in (ring[at : at + 64], ring[at:], ring[:at]):
            found = open_[part]
            if found.any():
                return int(part[found.argmax()])
        return view.lowest(requests)

    def _make_ring(self) -> None:
        points = np.concatenate(list(self._of_server.values()))
        order = points.argsort()
        self._points, self._servers = points[order].tolist(), np.repeat(list(self._of_server), self.points)[order]


def _point(key: Hash) -> int:
    data = key if isinstance(key, bytes) else b"%d" % key
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
