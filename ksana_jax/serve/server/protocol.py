"""A connection of uvicorn, whose applications may write parts of a body past ASGI and h11, see `BodyWriter`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from ksana_jax.serve.server.connections import Connections

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
        """True if the client is connected and has read enough of the output; if not, ASGI's `send` waits for it."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        """Writes a chunk, which must not be empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Protocol(H11Protocol):
    """An HTTP/1.1 connection whose responses have a BodyWriter, and whose requests are counted by `connections`."""

    def __init__(self, connections: Connections, **settings: Any):
        super().__init__(**settings)
        self._connections, self._application, self.app = connections, self.app, self._call

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":
            scope["extensions"] = {BODY_WRITER: BodyWriter(self.transport, self.flow)}
        self._connections.began(self.transport)
        try:
            await self._application(scope, receive, send)
        finally:
            self._connections.ended(self.transport)


def protocol_factory(client_timeout_s: float) -> Connections:
    """Returns the factory of a server's connections, which are cut when a client stalls for that many seconds."""

    def make(**settings: Any) -> Protocol:
        return Protocol(connections, **settings)

    connections = Connections(make, client_timeout_s)
    return connections
