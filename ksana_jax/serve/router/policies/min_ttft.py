"""The default policy: the earliest first token."""

from __future__ import annotations

import dataclasses

from ksana_jax.serve.router.policies.base import Policy
from ksana_jax.serve.router.request import RoutedRequest
from ksana_jax.serve.router.view import FleetView


@dataclasses.dataclass
class MinTTFT(Policy):
    """Chooses the server with the earliest expected first token: wait + own prefill without what it caches.

    Both are in seconds, so there is no threshold: a longer match wins exactly as long as it saves more than the longer
    queue costs, and blocks that all servers cache decide nothing.

    Source: the estimate by which Mooncake's conductor chooses a prefill instance, arXiv:2407.00079, algorithm 1.
    """

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        return view.lowest(view.wait_s + view.prefill_s)
