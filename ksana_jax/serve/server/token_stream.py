"""Streams tokens as server-sent events. Knows streams of outputs and their writers of events, no formats, no engine.

A token of each of many streams arrives with every step. Waking a task for each of them, and passing each event through
ASGI and h11, takes longer than the system call that sends it: events are written where the outputs arrive, as long as
the client keeps up.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.engine.request_stream import RequestStream
from ksana_jax.serve.server.generation import as_api_error, closing
from ksana_jax.serve.server.protocol import BODY_WRITER, BodyWriter
from ksana_jax.serve.server.sse import DONE, HEADERS, PING, error_events, until_disconnect


class TokenStream(Response):
    """Sends events of requests as their outputs arrive; ends the requests when the client leaves.

    Output for a client that lags stays in the mailboxes, joined, until the client has read the sent events. A
    failure becomes the last event before [DONE].

    Args:
      streams: of the outputs, as deltas; closed at the end, however it comes.
      write: called as write(index of the stream, output); returns whole events, or nothing.
      last: returns the events that follow all streams.
      ping_s: seconds without an event after which a comment is sent.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        write: Callable[[int, RequestOutput], str],
        last: Callable[[], str],
        ping_s: float,
    ):
        super().__init__()
        self._streams, self._format, self._last, self._ping_s = streams, write, last, ping_s
        self.raw_headers = list(HEADERS)
        self._num_open = len(streams)
        self._unread: dict[int, None] = {}  # streams whose outputs the task is to send
        self._wake: asyncio.Future[None] | None = None  # of the task, while it waits; it writes nothing meanwhile
        self._error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._loop = asyncio.get_running_loop()
        self._writer: BodyWriter | None = scope.get("extensions", {}).get(BODY_WRITER)
        leaving = asyncio.ensure_future(until_disconnect(receive))
        try:
            with closing(self._streams):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                self._sent_s = self._loop.time()
                for number, stream in enumerate(self._streams):
                    stream.listen(functools.partial(self._arrived, number))
                await self._send_events(send, leaving)
            if not leaving.done():
                await send({"type": "http.response.body", "body": self._end().encode(), "more_body": False})
        finally:
            leaving.cancel()

    def _arrived(self, number: int) -> None:
        """Writes what has arrived, if that can be done at once, or leaves it to the task."""
        if self._wake is None or self._unread or self._writer is None or not self._writer.is_ready:
            self._unread[number] = None
        elif events := self._events(number):
            self._writer.write(events.encode())
            self._sent_s = self._loop.time()
        if self._wake is not None and not self._wake.done() and (self._unread or not self._num_open):
            self._wake.set_result(None)

    def _events(self, number: int) -> str:
        """Returns the events of all that a stream has brought; empty if there is nothing to say."""
        found = ""
        try:
            while self._num_open and (output := self._streams[number].take()) is not None:
                self._num_open -= output.finished
                found += self._format(number, output)
        except Exception as error:
            self._error, self._num_open = error, 0
        return found

    async def _send_events(self, send: Send, leaving: asyncio.Future) -> None:
        """Sends what `_arrived` leaves, and comments in silence, until all streams have ended or the client leaves."""
        while not leaving.done():
            while self._unread:
                del self._unread[number := next(iter(self._unread))]
                if events := self._events(number):
                    await self._send(send, events.encode())
            if not self._num_open:
                return
            self._wake = self._loop.create_future()
            left_s = self._sent_s + self._ping_s - self._loop.time()
            await asyncio.wait((self._wake, leaving), timeout=max(left_s, 0.01), return_when=asyncio.FIRST_COMPLETED)
            self._wake = None
            if not self._unread and self._num_open and self._loop.time() >= self._sent_s + self._ping_s:
                await self._send(send, PING.encode())

    async def _send(self, send: Send, body: bytes) -> None:
        """Sends a part of the body; waits while the client does not read."""
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._sent_s = self._loop.time()

    def _end(self) -> str:
        return self._last() + DONE if self._error is None else error_events(as_api_error(self._error))
