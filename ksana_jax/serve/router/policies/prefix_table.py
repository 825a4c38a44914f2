"""KsanaLLM's policy: prefixes with dedicated servers, as many as their demand needs."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.ledger import UnfinishedRequest
from ksana_jax.serve.router.policies.base import Policy
from ksana_jax.serve.router.request import Hash, RoutedRequest
from ksana_jax.serve.router.table import Prefix, PrefixTable, TableSettings
from ksana_jax.serve.router.view import FleetView


@dataclasses.dataclass
class PrefixTablePolicy(TableSettings, Policy):
    """Chooses among the servers of the prompt's longest prefix in the table, and among all if it has none.

    A prefix gets servers when it is configured or frequent; see `TableSettings`. Servers join one at a time while its
    requests keep them busy, and leave when they no longer do. The request goes to the earliest expected first token
    among the servers of its prefix and those that cache more of the prompt than that, as after earlier turns. If it
    would wait there for longer than elsewhere with the prefix's prefill added, it goes elsewhere.

    Args:
      decode_token_s: seconds of work that an output token adds to a prefix's demand; their number is the mean so far.

    Source: the table of prefix tokens in the article on KsanaLLM: prefix -> set of servers that is scaled with its
    demand, few prefixes for each server, then load. Thresholds are ours.
    """

    decode_token_s: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(checks.number("decode_token_s", self.decode_token_s, 0), error=ConfigError)
        self.table = PrefixTable(self)
        self._outputs, self._ended = 0, 0
        self._prefix: Prefix | None = None  # of the request that is being sent

    def configure(self, hashes: Sequence[Hash], block_size: int, now: float, servers: Iterable[int] = ()) -> None:
        """Adds a prefix, by the hashes of its blocks, that stays in the table however rare it is.

        Args:
          servers: numbers of servers that it has from the start and keeps; demand may add others.
        """
        prefix = self.table.add(hashes, block_size, now, configured=True)
        for server in servers:
            self.table.give(prefix, server)

    def give(self, key: Hash, server: int) -> None:
        """Gives another server to a configured prefix, by the hash of its last block."""
        self.table.give(self.table.prefixes[key], server)

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        table, now = self.table, view.now
        prefix = self._prefix = table.find(request.hashes)
        if prefix is None:
            return view.lowest(view.wait_s + view.prefill_s)
        # Mostly one of few servers is chosen: the costs of all are computed only if none of these will do.
        longer = view.match.servers_with_more(prefix.num_blocks)
        inside, wait_s, total_s = view.among(prefix.servers | longer)
        crowded = self._is_crowded(prefix, wait_s, view)
        if table.should_grow(prefix, now, crowded):
            room = table.may_join(prefix, view.index.capacity * view.settings.block_size)
            if not view.all_ready:
                room &= view.closed == 0
            if room[room.argmax()]:  # `any` takes three times as long
                first_token_s = view.wait_s + view.prefill_s
                joined = view.lowest(np.where(room, first_token_s, np.inf))
                table.join(prefix, joined, now)
                if not longer >> joined & 1:
                    at, inside, total_s = bisect.bisect(inside, joined), list(inside), list(total_s)
                    inside.insert(at, joined)
                    total_s.insert(at, first_token_s.item(joined))
                crowded = False
            else:
                prefix.changed_s = now  # look again after change_every_s
        if crowded:
            outside_s = view.wait_s + view.prefill_s
            outside_s[inside] = np.inf
            return view.lowest(outside_s)
        return inside[view.least(total_s)]

    def _is_crowded(self, prefix: Prefix, wait_s: Sequence[float], view: FleetView) -> bool:
        """True if its servers' least wait exceeds another server's with the prefix's prefill added."""
        if not len(wait_s):
            return True
        inside_s, ledger = _least(wait_s), view.ledger
        if inside_s <= prefix.num_tokens * ledger.least_token_s:  # usual: no wait is below 0
            return False
        # The minimum over all servers does: a server of the prefix has the shorter wait on the left anyway.
        all_s = view.wait_s + prefix.num_tokens * ledger.token_s
        return inside_s > _least(all_s if view.all_ready else all_s[view.ready])

    def sent(self, request: RoutedRequest, server: int, view: FleetView) -> None:
        self.table.arrived(request.hashes, view.settings.block_size, view.now)
        if self._prefix is not None:
            live = view.ledger.live[request.request_id]
            decode_s = self.decode_token_s * self._outputs / max(self._ended, 1)
            self._prefix.arrivals.add(1, view.now)
            self._prefix.work.add(live.work * float(view.ledger.token_s[server]) + decode_s, view.now)

    def ended(self, live: UnfinishedRequest, now: float) -> None:
        self._outputs += live.num_output
        self._ended += 1

    def added(self, server: int) -> None:
        self.table.grow(server + 1)

    def removed(self, server: int, now: float) -> None:
        self.table.server_gone(server)


def _least(values: np.ndarray | Sequence[float]) -> float:
    # The minimum of an array by argmin takes a third of the time of min.
    return float(values[values.argmin()]) if isinstance(values, np.ndarray) else min(values)
