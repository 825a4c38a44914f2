"""Interface of a policy, which chooses the server of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ksana_jax.serve.router.ledger import UnfinishedRequest
from ksana_jax.serve.router.request import RoutedRequest

if TYPE_CHECKING:
    from ksana_jax.serve.router.view import FleetView


class Policy:
    """Chooses servers for one router. A subclass is a dataclass whose fields are its settings.

    Servers are numbered from 0; the number of one that is removed may be given to another. A policy that remembers
    something overrides the callbacks for changes of requests and servers.
    """

    def choose(self, request: RoutedRequest, view: FleetView) -> int:
        """Returns the number of a server in view.ready."""
        raise NotImplementedError(f"{type(self).__name__} has no choose(request, view)")

    def sent(self, request: RoutedRequest, server: int, view: FleetView) -> None:
        """A request goes to the server that was chosen; ledger and index have it already."""

    def first_token(self, live: UnfinishedRequest, now: float) -> None:
        """A request's prefill has ended."""

    def ended(self, live: UnfinishedRequest, now: float) -> None:
        """A request has ended."""

    def added(self, server: int) -> None:
        """A server has been added."""

    def removed(self, server: int, now: float) -> None:
        """A server was removed."""
