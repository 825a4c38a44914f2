"""A queue in the router that is fair to clients: the least-served client is next."""

from __future__ import annotations

import collections
import queue
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Orders waiting requests by the service that their clients have had: the virtual token counter.

    Each client has a counter of the tokens served, weighted; the next request is the oldest one of the client with the
    lowest counter. A client that comes back is lifted to the lowest counter of waiting clients, so that none saves up
    service. Counters of two clients that both wait all the time differ by at most max(w_p x longest input, w_q x tokens
    that fit a batch), and the service they get in any interval by at most twice that.

    Input is charged as tokens that are computed: charging for cached ones would punish locality.

    Args:
      input_weight, output_weight: w_p and w_q.
      max_queued: maximum number of requests; None for no limit.

    Source: Sheng et al., Fairness in Serving Large Language Models, arXiv:2401.00588, algorithm 2 and theorem 4.4.
    """

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0, max_queued: int | None = None):
        self.input_weight, self.output_weight, self.max_queued = input_weight, output_weight, max_queued
        self._queues: dict[str, collections.deque[Item]] = {}
        self._counters: dict[str, float] = {}
        self._last = ""  # client that was the last to leave the queue empty
        self._num_queued = 0

    def __len__(self) -> int:
        return self._num_queued

    def counter(self, client: str) -> float:
        """Returns the weighted tokens served to a client, and the tokens by which it was lifted."""
        return self._counters.get(client, 0.0)

    def push(self, client: str, item: Item) -> None:
        """Adds a request.

        Raises:
          queue.Full: there are max_queued requests.
        """
        if self.max_queued is not None and self._num_queued >= self.max_queued:
            raise queue.Full(f"{self._num_queued:,} requests wait, at most {self.max_queued:,} may")
        if client not in self._queues:
            self._counters[client] = max(self.counter(client), self._floor())
            self._queues[client] = collections.deque()
        self._queues[client].append(item)
        self._num_queued += 1

    def pop(self) -> tuple[str, Item] | None:
        """Removes the next request, with its client; None if there is none. Charge its input when it is sent."""
        if not self._queues:
            return None
        client = min(self._queues, key=self._counters.__getitem__)
        item = self._queues[client].popleft()
        self._left(client)
        return client, item

    def charge(self, client: str, num_input: float = 0, num_output: float = 0) -> None:
        """Adds tokens to a client's counter.

        Args:
          num_input: prompt tokens that are computed; negative to refund tokens that turned out to be cached.
          num_output: tokens that were generated.
        """
        tokens = self.input_weight * num_input + self.output_weight * num_output
        self._counters[client] = self.counter(client) + tokens

    def remove(self, client: str, item: Item) -> bool:
        """Removes a request whose client has disconnected; returns whether it was queued."""
        items = self._queues.get(client, ())
        at = next((at for at, waiting in enumerate(items) if waiting is item), None)
        if at is None:
            return False
        del items[at]  # pyright: ignore[reportIndexIssue]  it is a deque, since something was found in it
        self._left(client)
        return True

    def _left(self, client: str) -> None:
        self._num_queued -= 1
        if not self._queues[client]:
            del self._queues[client]
            self._last = self._last if self._queues else client
            # Clients below the floor would be lifted to it on return, so their counters can be dropped.
            if len(self._counters) > 2 * len(self._queues) + 1024:
                floor = self._floor()
                kept = {c: n for c, n in self._counters.items() if c in self._queues or n >= floor}
                self._counters = kept

    def _floor(self) -> float:
        """Counter to which a client that comes back is lifted."""
        return min((self._counters[client] for client in self._queues), default=self.counter(self._last))
