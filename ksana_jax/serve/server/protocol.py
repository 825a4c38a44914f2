"""A connection of uvicorn, with limits of time for its client: to send a request's headers, and to read its answer.

uvicorn waits for both for ever: half a request, or a window of zero, would hold a connection until the process ends.
Applications may write parts of a body past ASGI and h11, see `BodyWriter`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

# Extension of the ASGI scope with the BodyWriter of a response; HTTP/1.0, whose bodies have no chunks, has none.
BODY_WRITER = "ksana.body_writer"


class BodyWriter:
    """Writes parts of a response's body as chunks, after its start and before its end, which ASGI's `send` sends.

    Only for a body without content-length. h11 does not see the chunks, which change nothing of its state.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl):
        self._transport, self._flow = transport, flow

    @property
    def is_ready(self) -> bool:
        """Whether the client is there and has read enough of what was sent; if not, ASGI's `send` waits for it."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Writes a chunk, which must not be empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Protocol(H11Protocol):
    """An HTTP/1.1 connection that is cut when its client stalls for `client_timeout_s` seconds."""

    client_timeout_s = 60.0

    _headers_due: asyncio.TimerHandle | None = None
    _reading_due: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self._application, self.app = self.app, self._call

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":
            scope["extensions"] = {BODY_WRITER: BodyWriter(self.transport, self.flow)}
        await self._application(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_headers()

    def _await_headers(self) -> None:
        """Starts the clock while headers are due, and stops it once they are there."""
        due = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if due and self._headers_due is None:
            self._headers_due = self.loop.call_later(self.client_timeout_s, self._cut)
        elif not due and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due = self.loop.call_later(self.client_timeout_s, self._cut)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        # A client that has not read the end of its answer would keep a closed transport alive.
        if self.transport.get_write_buffer_size():
            self._reading_due = self._reading_due or self.loop.call_later(self.client_timeout_s, self._cut)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers_due, self._reading_due):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _cut(self) -> None:
        self.transport.abort()


def protocol_class(client_timeout_s: float) -> type[Protocol]:
    """Returns the class of connections whose clients have this much time."""
    settings: dict[str, Any] = {"client_timeout_s": client_timeout_s}
    return type("Protocol", (Protocol,), settings)
