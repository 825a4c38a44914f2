"""Chooses the server of a request: policies, what each server caches, work under way. No HTTP, no jax.

The proxy and the simulator share it. Names resolve on first use: the command's help needs the proxy's settings alone.
"""

from typing import TYPE_CHECKING

from ksana_jax.core.lazy import lazy_names

if TYPE_CHECKING:
    from ksana_jax.kv.prefix_hashing import hashes_of
    from ksana_jax.serve.router.events import AllBlocksCleared, BlockRemoved, BlockStored
    from ksana_jax.serve.router.ledger import UnfinishedRequest
    from ksana_jax.serve.router.policies import POLICIES, read_policy
    from ksana_jax.serve.router.policies.base import Policy
    from ksana_jax.serve.router.request import RoutedRequest
    from ksana_jax.serve.router.router import NoServer, Router
    from ksana_jax.serve.router.settings import RouterSettings
    from ksana_jax.serve.router.view import FleetView

_PUBLIC = {
    "ksana_jax.kv.prefix_hashing": "hashes_of",
    "ksana_jax.serve.router.events": "AllBlocksCleared BlockRemoved BlockStored",
    "ksana_jax.serve.router.ledger": "UnfinishedRequest",
    "ksana_jax.serve.router.policies": "POLICIES read_policy",
    "ksana_jax.serve.router.policies.base": "Policy",
    "ksana_jax.serve.router.request": "RoutedRequest",
    "ksana_jax.serve.router.router": "NoServer Router",
    "ksana_jax.serve.router.settings": "RouterSettings",
    "ksana_jax.serve.router.view": "FleetView",
}
__all__ = ["POLICIES", "AllBlocksCleared", "BlockRemoved", "BlockStored", "UnfinishedRequest", "NoServer"]
__all__ += ["Policy", "RoutedRequest", "Router", "RouterSettings", "FleetView", "hashes_of", "read_policy"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
