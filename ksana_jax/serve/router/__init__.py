"""Chooses the server of a request: policies, what each server caches, work under way. No HTTP, no jax.

The proxy and the simulator share it.
"""

from ksana_jax.kv.prefix_hashing import hashes_of
from ksana_jax.serve.router.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from ksana_jax.serve.router.ledger import UnfinishedRequest
from ksana_jax.serve.router.policies import POLICIES, read_policy
from ksana_jax.serve.router.policies.base import Policy
from ksana_jax.serve.router.request import RoutedRequest
from ksana_jax.serve.router.router import NoServer, Router
from ksana_jax.serve.router.settings import RouterSettings
from ksana_jax.serve.router.view import FleetView

__all__ = [
    "POLICIES",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "UnfinishedRequest",
    "NoServer",
    "Policy",
    "RoutedRequest",
    "Router",
    "RouterSettings",
    "FleetView",
    "hashes_of",
    "read_policy",
]
