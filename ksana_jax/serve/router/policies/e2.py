"""Preble's policy: exploit a cached prefix, or explore for the cheapest server."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router.ledger import UnfinishedRequest
from ksana_jax.serve.router.policies.base import Policy
from ksana_jax.serve.router.request import Hash, RoutedRequest
from ksana_jax.serve.router.view import FleetView

# Prefixes whose waits are remembered.
MAX_PREFIXES = 4096


@dataclasses.dataclass
class E2(Policy):
    """Exploits the longest match if it is more than the rest of the prompt; explores all servers otherwise.

    The cheapest server is the one with the lowest sum of its load in the last window_s (prefill of uncached tokens,
    and decode), this prompt's prefill there, and the prefill of cached tokens that it would replace, by how often they
    were hit. A match on the most loaded server is not exploited while that has more than `rebalance` times
    the load of the least loaded one; and a prefix is copied, by exploring, when requests wait `copy` times as long for
    it as they used to.

    Args:
      window_s: seconds of load that are remembered.
      decode_token_s: seconds of load for an output token; their number is the mean so far.

    Source: Preble, arXiv:2407.00023, section 3. How long a prefix's requests wait is here the expected wait, by the
    first block that not all servers cache.
    """

    window_s: float = 180.0
    rebalance: float = 1.5
    copy: float = 2.0
    decode_token_s: float = 0.001

    def __post_init__(self) -> None:
        checks.require(
            checks.number("window_s", self.window_s, above=0),
            checks.number("rebalance", self.rebalance, 1),
            checks.number("copy", self.copy, 1),
            checks.number("decode_token_s", self.decode_token_s, 0),
            error=ConfigError,
        )
        # (time, server, load in seconds, prompt tokens, matched tokens), oldest first, and their sums by server: arrays
        # for values that a choice compares, lists for the rest, whose items are read and written faster.
        self._window: collections.deque[tuple[float, int, float, int, int]] = collections.deque()
        self._load_s, self._hit_rate = np.zeros(0), np.zeros(0)
        self._prompt: list[int] = []
        self._matched: list[int] = []
        self._count: list[int] = []
        self._waits: collections.OrderedDict[Hash, tuple[float, float]] = collections.OrderedDict()
        self._outputs, self._ended = 0, 0

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        self._forget(view.now)
        load_s = self._load_s
        ready = load_s if view.all_ready else load_s[view.ready]
        most = ready[ready.argmax()]
        skewed = most > self.rebalance * ready[ready.argmin()]
        if view.match.longest * view.settings.block_size * 2 > request.num_prompt:
            holders = view.ready_of(view.match.levels[-1][1])
            if len(holders):
                server = view.lowest_of(holders, load_s)
                if not (skewed and load_s[server] == most) and not self._must_copy(request, view, server):
                    return server
        # Tokens that would be replaced are worth their prefill times the share of tokens that were hit.
        full = view.index.num_blocks >= view.index.capacity
        return view.lowest(load_s + view.prefill_s * (1 + self._hit_rate * full))

    def _must_copy(self, request: RoutedRequest, view: FleetView, server: int) -> bool:
        """True if the prefix's requests wait `copy` times as long as they used to; records the wait."""
        levels, hashes = view.match.levels, request.hashes
        everywhere = sum(servers.bit_count() for _, servers in levels) >= len(view.ready)
        key = hashes[min(levels[0][0] if everywhere else 0, len(hashes) - 1)]
        ledger = view.ledger
        expected_s = ledger.wait_of_s(view.now)(server) + view.work_of(server) * ledger.token_s.item(server)
        recent_s, usual_s = self._waits.get(key, (expected_s, expected_s))
        recent_s += 0.2 * (expected_s - recent_s)
        usual_s += 0.02 * (expected_s - usual_s)
        self._waits[key] = recent_s, usual_s
        self._waits.move_to_end(key)
        if len(self._waits) > MAX_PREFIXES:
            self._waits.popitem(last=False)
        return recent_s > self.copy * usual_s

    def sent(self, request: RoutedRequest, server: int, view: FleetView) -> None:
        live = view.ledger.live[request.request_id]
        decode_s = self.decode_token_s * self._outputs / max(self._ended, 1)
        load_s = live.work * float(view.ledger.token_s[server]) + decode_s
        self._window.append((view.now, server, load_s, request.num_prompt, live.matched))
        self._add(server, load_s, request.num_prompt, live.matched, 1)

    def ended(self, live: UnfinishedRequest, now: float) -> None:
        self._outputs += live.num_output
        self._ended += 1

    def added(self, server: int) -> None:
        if server == len(self._load_s):
            self._load_s, self._hit_rate = np.append(self._load_s, 0.0), np.append(self._hit_rate, 0.0)
            for sums in (self._prompt, self._matched, self._count):
                sums.append(0)

    def removed(self, server: int, now: float) -> None:
        self._window = collections.deque(entry for entry in self._window if entry[1] != server)
        for sums in (self._load_s, self._hit_rate, self._prompt, self._matched, self._count):
            sums[server] = 0

    def _forget(self, now: float) -> None:
        window = self._window
        while window and window[0][0] <= now - self.window_s:
            _, server, load_s, prompt, matched = window.popleft()
            self._add(server, -load_s, -prompt, -matched, -1)

    def _add(self, server: int, load_s: float, prompt: int, matched: int, count: int) -> None:
        self._prompt[server] += prompt
        self._matched[server] += matched
        self._count[server] += count
        self._hit_rate[server] = self._matched[server] / max(self._prompt[server], 1)
        # Idle servers have a load of exactly 0: rounding errors would break ties between them.
        self._load_s[server] = self._load_s[server] + load_s if self._count[server] else 0.0
