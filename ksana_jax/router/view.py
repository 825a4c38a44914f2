"""What a policy sees at one decision: servers, their load, and what they cache of the prompt."""

from __future__ import annotations

import functools
import random

import numpy as np

from ksana_jax.router.index import CacheIndex, Match
from ksana_jax.router.ledger import Ledger
from ksana_jax.router.request import RoutedRequest
from ksana_jax.router.settings import RouterSettings


class View:
    """The servers as one request finds them, numbered from 0; arrays are [S] and must not be changed.

    Attributes:
      now: seconds on the router's clock.
      ready: numbers of the servers that may be chosen, ascending; at least one.
      closed: 0.0 for those, inf for all others.
      ledger: work under way on each server. index: what each caches. match: what each caches of this prompt.
      random: the router's generator. Use no other, so that equal seeds give equal choices.
    """

    def __init__(
        self,
        request: RoutedRequest,
        now: float,
        ready: np.ndarray,
        closed: np.ndarray,
        match: Match,
        ledger: Ledger,
        index: CacheIndex,
        pool_tokens: np.ndarray | None,
        settings: RouterSettings,
        random: random.Random,
    ):
        self.request, self.now, self.ready, self.closed, self.match = request, now, ready, closed, match
        self.ledger, self.index, self.settings, self.random = ledger, index, settings, random
        self.pool_tokens = pool_tokens

    @functools.cached_property
    def matched(self) -> np.ndarray:
        """Prompt tokens that each server caches, at most all but the last: sampling needs that one's logits."""
        tokens = self.match.blocks(self.ledger.num_servers) * self.settings.block_size
        return np.minimum(tokens, self.request.num_prompt - 1)

    @functools.cached_property
    def wait_s(self) -> np.ndarray:
        """Seconds until each server begins with this request, by the prefill that it has before it."""
        return self.ledger.wait_s(self.now)

    @functools.cached_property
    def prefill_s(self) -> np.ndarray:
        """Seconds of this prompt's prefill on each server, without the tokens that it caches."""
        if not self.match.levels:
            return self.ledger.token_s * self.settings.work(self.request.num_prompt, 0)
        return self.settings.work(self.request.num_prompt - self.matched, self.matched) * self.ledger.token_s

    @functools.cached_property
    def crowding_s(self) -> np.ndarray:
        """Seconds added for rows that decode beside the prefill, and for a pool that is nearly full."""
        ledger, settings = self.ledger, self.settings
        rows = ledger.rows + ledger.other_rows if ledger.has_other else ledger.rows
        added = rows * settings.decode_row_s
        if self.pool_tokens is not None:
            added = added + settings.full_pool_s * (ledger.held > settings.full_pool * self.pool_tokens)
        return added

    def lowest(self, cost: np.ndarray) -> int:
        """Returns the ready server with the lowest cost [S]; ties are broken at random."""
        cost = cost + self.closed
        ties = (cost == cost.min()).nonzero()[0]
        return int(ties[0] if len(ties) == 1 else ties[int(self.random.random() * len(ties))])

    def any_ready(self) -> int:
        """Returns a ready server at random."""
        return int(self.ready[int(self.random.random() * len(self.ready))])
