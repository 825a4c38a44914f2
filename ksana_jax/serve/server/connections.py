"""Connections with clients: limited in number and in the time that a client may stall. Knows no HTTP.

uvicorn, which serves models, and aiohttp, which serves the proxy, wait without a limit for the headers of a request,
and for a client that does not read its answer.
"""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Callable
from typing import Any

# Descriptors reserved for other uses, connections under the lowest limit, and under none.
RESERVED, FEWEST, MOST = 32, 8, 2**16
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def default_limit() -> int:
    """Returns how many connections a proxy has descriptors for (`ulimit -n`), at two each: one is to a server."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return MOST
    return min(max((descriptors - RESERVED) // 2, FEWEST), MOST)


class Connections:
    """Makes connections; at the limit, one that waits for a request makes room for a new one.

    Args:
      make: returns a protocol that answers requests, and calls `began` and `ended` for each.
      timeout_s: within which a client must send the headers of a request, and read an answer.
      most: connections at once; if all have requests under way, a new one gets status 503.
    """

    def __init__(self, make: Callable[..., Any], timeout_s: float, most: float = math.inf):
        self._make, self.timeout_s, self.most = make, timeout_s, most
        self.waiting: dict[Connection, None] = {}  # without a request, those that wait longest first
        self.open: dict[asyncio.BaseTransport, Connection] = {}

    def __call__(self, **settings: Any) -> Connection:
        return Connection(self, self._make(**settings))

    def began(self, transport: asyncio.BaseTransport | None) -> None:
        """Records that the headers of a request have arrived."""
        if transport in self.open:
            self.open[transport].begin()

    def ended(self, transport: asyncio.BaseTransport | None) -> None:
        """Records that a request has its answer, which may not be wholly sent yet."""
        if transport in self.open:
            self.open[transport].end()

    def admit(self, new: Connection) -> bool:
        """Counts a new connection; returns False if there is no room."""
        if len(self.open) >= self.most:
            if (oldest := next(iter(self.waiting), None)) is None:
                return False
            oldest.abort()
        self.open[new.transport] = new
        return True

    def forget(self, connection: Connection) -> None:
        """Uncounts a closed connection."""
        self.open.pop(connection.transport, None)
        self.waiting.pop(connection, None)


class Connection(asyncio.Protocol):
    """One connection, which forwards events to another protocol and cuts a client that stalls."""

    transport: asyncio.Transport

    def __init__(self, all: Connections, inner: Any):
        self._all, self._inner = all, inner
        self._num_requests = 0  # several for a moment, if the client sends one before it has the last one's answer
        self._request_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.transport = transport
        self._inner.connection_made(transport)
        if self._all.admit(self):
            self._wait()
            return
        transport.write(FULL)
        transport.close()

    def begin(self) -> None:
        """Stops the clock: a request has arrived."""
        self._num_requests += 1
        self._all.waiting.pop(self, None)
        if self._request_due is not None:
            self._request_due.cancel()

    def end(self) -> None:
        """Starts the clock for the next request, unless it has arrived."""
        self._num_requests -= 1
        if not self._num_requests:
            self._wait()

    def _wait(self) -> None:
        self._all.waiting[self] = None
        self._expect_request(math.inf)

    def _expect_request(self, unread: float) -> None:
        loop = asyncio.get_running_loop()
        self._request_due = loop.call_later(self._all.timeout_s, self._look, unread)

    def _look(self, before: float) -> None:
        # A client may still be reading the last answer.
        if 0 < (unread := self.transport.get_write_buffer_size()) < before:
            self._expect_request(unread)
        else:
            self.abort()

    def abort(self) -> None:
        """Cuts the connection."""
        self._all.forget(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._reading_due = asyncio.get_running_loop().call_later(self._all.timeout_s, self.abort)
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_due, self._reading_due):
            if timer is not None:
                timer.cancel()
        self._all.forget(self)
        self._inner.connection_lost(exc)
