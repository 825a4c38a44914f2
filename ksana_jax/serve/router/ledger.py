"""The router's own account of unfinished requests, by server: waiting prefill, decoding rows, tokens held.

Loads that are polled are too old to decide by: all requests of a burst see the same. A ledger sees each choice at once.
Reports of the servers only add what this router did not send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ksana_jax.serve.router.request import RoutedRequest
from ksana_jax.serve.router.settings import RouterSettings

# Weight of the old pace at each new measurement.
MEMORY = 0.95


@dataclasses.dataclass(slots=True, eq=False)
class UnfinishedRequest:
    """An unfinished request.

    server: number of its server. matched: prompt tokens that the server was expected to have cached. work: tokens to
    prefill, weighted by the cost of their context. sent_s: when it was sent.
    """

    request: RoutedRequest
    server: int
    matched: int
    work: int
    sent_s: float
    decoding: bool = False
    num_output: int = 0

    @property
    def held(self) -> int:
        """Tokens in the server's pool that no other request shares, as far as is known."""
        return self.request.num_prompt - self.matched + self.num_output


class Ledger:
    """Sums over unfinished requests, [S] for S servers; integers, held exactly by the float64 of the costs.

    Attributes:
      work: tokens that wait for prefill or are in it. front: tokens of the oldest waiting request.
      since: when the server began with that one, in seconds.
      rows: requests that decode. requests: all unfinished ones. held: tokens in the pool.
      token_s: seconds of prefill per token, as configured x the measured pace. least_token_s: the lowest of them.
      live: unfinished requests by id.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.work, self.front, self.rows, self.requests, self.held = (np.zeros(0) for _ in range(5))
        self.since, self.token_s, self._configured_s = np.zeros(0), np.zeros(0), np.zeros(0)
        self.least_token_s = 0.0
        self._full = np.zeros(0)  # tokens held from which a pool counts as full
        # Seconds of work, rows and a full pool together, and of front: kept, so that a decision takes few operations.
        self._load_s, self._front_s = np.zeros(0), np.zeros(0)
        self.live: dict[str, UnfinishedRequest] = {}
        self._waiting: list[dict[str, UnfinishedRequest]] = []
        # Seconds of prefill measured and expected, over recent first tokens. One pace for all servers: with one for
        # each, noise would decide between idle servers, and one of them would get everything.
        self._measured_s, self._expected_s, self._pace = 1.0, 1.0, 1.0

    def grow(self) -> None:
        """Adds a server."""
        for name in ("work", "front", "rows", "requests", "held", "since", "token_s"):
            setattr(self, name, np.append(getattr(self, name), 0.0))
        for name in ("_configured_s", "_full", "_load_s", "_front_s"):
            setattr(self, name, np.append(getattr(self, name), 0.0))
        self._waiting.append({})

    def set_speed(self, server: int, tokens_per_s: float, pool_tokens: float) -> None:
        """Sets a server's configured rate of prefill, and the size of its pool, which may be infinite."""
        self._configured_s[server] = 1 / tokens_per_s
        self._full[server] = self._settings.full_pool * pool_tokens
        self._set_pace(self._pace)

    def add(self, live: UnfinishedRequest) -> None:
        """Adds a request that is being sent to live.server at live.sent_s."""
        server, waiting = live.server, self._waiting[live.server]
        if not waiting:
            self.front[server], self.since[server] = live.work, live.sent_s
        name = live.request.request_id
        waiting[name] = self.live[name] = live
        self.work[server] += live.work
        self.requests[server] += 1
        self.held[server] += live.held
        self._settle(server)

    def first_token(self, request_id: str, now: float) -> UnfinishedRequest | None:
        """Moves a request from prefill to decode; returns it, or None if it is not in prefill."""
        live = self.live.get(request_id)
        if live is None or live.decoding:
            return None
        server = live.server
        self._measure(now - float(self.since[server]), live.work * float(self._configured_s[server]))
        self._leave_queue(live, now)
        live.decoding = True
        self.rows[server] += 1
        self._settle(server)
        return live

    def progress(self, request_id: str, num_tokens: int, now: float) -> None:
        """Adds output tokens to a request; the first of them end its prefill."""
        self.first_token(request_id, now)
        live = self.live.get(request_id)
        if live is not None:
            live.num_output += num_tokens
            self.held[live.server] += num_tokens
            self._settle(live.server)

    def end(self, request_id: str, now: float) -> UnfinishedRequest | None:
        """Removes a request; returns it, or None if it has ended before."""
        live = self.live.pop(request_id, None)
        if live is None:
            return None
        if live.decoding:
            self.rows[live.server] -= 1
        else:
            self._leave_queue(live, now)
        self.requests[live.server] -= 1
        self.held[live.server] -= live.held
        self._settle(live.server)
        return live

    def on(self, server: int) -> list[UnfinishedRequest]:
        """Returns the unfinished requests of a server."""
        return [live for live in self.live.values() if live.server == server]

    def wait_s(self, now: float) -> np.ndarray:
        """Seconds [S] until each server would begin with a request that was sent now.

        The prefill before it, where the request in front is assumed to progress at the expected rate, up to its end;
        the delay by rows that decode; and the loss of time on a server whose pool is full.
        """
        return self._load_s - np.minimum(now - self.since, self._front_s)

    def wait_of_s(self, now: float) -> Callable[[int], float]:
        """Returns a function that gives `wait_s` of one server: faster than the whole array for a few servers."""
        load_s, since, front_s = self._load_s.item, self.since.item, self._front_s.item

        def wait_of_s(server: int) -> float:
            passed_s, most_s = now - since(server), front_s(server)
            return load_s(server) - (passed_s if passed_s < most_s else most_s)

        return wait_of_s

    def _settle(self, at: int | slice) -> None:
        """Computes the seconds of one or all servers from their sums."""
        s, token_s = self._settings, self.token_s[at]
        load_s = self.work[at] * token_s + self.rows[at] * s.decode_row_s
        self._load_s[at] = load_s + (self.held[at] > self._full[at]) * s.full_pool_s
        self._front_s[at] = self.front[at] * token_s

    def _leave_queue(self, live: UnfinishedRequest, now: float) -> None:
        server, waiting = live.server, self._waiting[live.server]
        del waiting[live.request.request_id]
        self.work[server] -= live.work
        self.front[server] = next(iter(waiting.values())).work if waiting else 0
        self.since[server] = now

    def _measure(self, measured_s: float, expected_s: float) -> None:
        self._measured_s = MEMORY * self._measured_s + measured_s
        self._expected_s = MEMORY * self._expected_s + expected_s
        pace = self._measured_s / max(self._expected_s, 1e-9)
        if pace > 0 and abs(pace - self._pace) > 0.02 * self._pace:
            self._set_pace(pace)

    def _set_pace(self, pace: float) -> None:
        self._pace, self.token_s = pace, self._configured_s * pace
        self.least_token_s = float(self.token_s.min())
        self._settle(slice(None))
