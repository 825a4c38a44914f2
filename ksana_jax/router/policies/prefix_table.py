"""KsanaLLM's policy: prefixes with servers of their own, as many as their demand needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ksana_jax import checks
from ksana_jax.errors import ConfigError
from ksana_jax.router.ledger import Live
from ksana_jax.router.policies.base import Policy
from ksana_jax.router.request import Hash, RoutedRequest
from ksana_jax.router.table import Prefix, PrefixTable, TableSettings
from ksana_jax.router.view import View


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

    def configure(self, hashes: Sequence[Hash], block_size: int, now: float) -> None:
        """Adds a prefix, by the hashes of its blocks, that stays in the table however rare it is."""
        self.table.add(hashes, block_size, now, configured=True)

    def choose(self, request: RoutedRequest, view: View) -> int:
        table, now = self.table, view.now
        cost = view.wait_s + view.prefill_s + view.crowding_s
        prefix = table.find(request.hashes)
        self._prefix = prefix
        if prefix is None:
            return view.lowest(cost)
        inside = self._inside(prefix, view)
        crowded = False
        if inside.any():
            wait = view.wait_s + view.crowding_s + view.closed
            elsewhere_s = (wait + prefix.num_tokens * view.ledger.token_s)[~inside]
            crowded = len(elsewhere_s) > 0 and bool(wait[inside].min() > elsewhere_s.min())
        if table.should_grow(prefix, now, crowded):
            room = table.may_join(prefix, view.index.capacity * view.settings.block_size)
            joins = np.where(room, cost + view.closed, np.inf)
            if np.isfinite(joins).any():
                table.join(prefix, view.lowest(joins), now)
                inside, crowded = self._inside(prefix, view), False
            else:
                prefix.changed_s = now  # look again after change_every_s
        if inside.any():
            cost = np.where(inside != crowded, cost, np.inf)
        return view.lowest(cost)

    def _inside(self, prefix: Prefix, view: View) -> np.ndarray:
        """Returns which ready servers, [S] bool, are the prefix's, or cache more of this prompt than the prefix."""
        inside = np.zeros(len(view.closed), bool)
        inside[prefix.members] = True
        if view.match.longest > prefix.num_blocks:
            inside |= view.matched > prefix.num_tokens
        inside &= view.closed == 0
        return inside

    def sent(self, request: RoutedRequest, server: int, view: View) -> None:
        self.table.arrived(request.hashes, view.settings.block_size, view.now)
        if self._prefix is not None:
            live = view.ledger.live[request.request_id]
            decode_s = self.decode_token_s * self._outputs / max(self._ended, 1)
            self._prefix.arrivals.add(1, view.now)
            self._prefix.work.add(live.work * float(view.ledger.token_s[server]) + decode_s, view.now)

    def ended(self, live: Live, now: float) -> None:
        self._outputs += live.num_output
        self._ended += 1

    def added(self, server: int) -> None:
        self.table.grow(server + 1)

    def removed(self, server: int, now: float) -> None:
        self.table.server_gone(server)

    def check(self) -> None:
        self.table.check()
