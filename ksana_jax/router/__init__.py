"""Chooses the server of a request: policies, what each server caches, work under way. No HTTP, no jax.

The proxy and the simulator share it.
"""

from ksana_jax.router.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from ksana_jax.router.hashing import hashes_of
from ksana_jax.router.ledger import Live
from ksana_jax.router.policies import POLICIES, read_policy
from ksana_jax.router.policies.base import Policy
from ksana_jax.router.request import RoutedRequest
from ksana_jax.router.router import NoServer, Router
from ksana_jax.router.settings import RouterSettings
from ksana_jax.router.view import View

__all__ = [
    "POLICIES",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "Live",
    "NoServer",
    "Policy",
    "RoutedRequest",
    "Router",
    "RouterSettings",
    "View",
    "hashes_of",
    "read_policy",
]
