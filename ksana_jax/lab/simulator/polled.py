"""A router that decides by polled loads, to show the value of its own ledger."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.routing.ledger import Ledger, Live
from ksana_jax.serve.routing.policies import Policy, read_policy
from ksana_jax.serve.routing.request import RoutedRequest
from ksana_jax.serve.routing.view import View


@dataclasses.dataclass
class Polled(Policy):
    """Another policy on stale loads, as last polled: all requests of a burst see the same.

    Args:
      of: the policy, in a form that `read_policy` takes. every_s: seconds between two polls.
    """

    of: Any = "min_ttft"
    every_s: float = 1.0

    def __post_init__(self) -> None:
        checks.require(checks.number("every_s", self.every_s, above=0), error=ConfigError)
        self._policy, self._at = read_policy(self.of), -math.inf
        self._seen: Ledger | None = None

    def choose(self, request: RoutedRequest, view: View) -> int:
        if view.now - self._at >= self.every_s:
            self._at, self._seen = view.now, copy.copy(view.ledger)
            for name, value in vars(self._seen).items():
                if isinstance(value, np.ndarray):
                    setattr(self._seen, name, value.copy())
        current = view.ledger, view.now
        assert self._seen is not None
        view.ledger, view.now = self._seen, self._at
        chosen = self._policy.choose(request, view)
        view.ledger, view.now = current
        return chosen

    def sent(self, request: RoutedRequest, server: int, view: View) -> None:
        self._policy.sent(request, server, view)

    def first_token(self, live: Live, now: float) -> None:
        self._policy.first_token(live, now)

    def ended(self, live: Live, now: float) -> None:
        self._policy.ended(live, now)

    def added(self, server: int) -> None:
        self._policy.added(server)

    def removed(self, server: int, now: float) -> None:
        self._policy.removed(server, now)
