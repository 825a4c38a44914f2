"""Server-sent events: a response that writes events as they come, and ends when its client leaves. Knows no engine.

Each event is `data: {json}` and an empty line; the last one is `data: [DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ksana_jax.serve.server.errors import APIError
from ksana_jax.serve.server.generation import as_api_error

DONE = "data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


def event(content: Any) -> str:
    """Returns an event with JSON."""
    return f"data: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n"


def error_events(error: APIError) -> str:
    """Returns the events that end a stream whose headers have been sent."""
    return event(error.body) + DONE


class EventStream(Response):
    """Sends the events of an iterator, each piece in one write; closes the iterator when the client leaves.

    An error in the iterator becomes the last event before [DONE].

    Args:
      events: pieces of text, whole events each; empty pieces are not sent.
      ping_s: seconds without a piece after which a comment is sent.
    """

    def __init__(self, events: AsyncIterator[str], ping_s: float):
        super().__init__()
        self._events, self._ping_s = events, ping_s
        self.raw_headers = list(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(until_disconnect(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing

    async def _write(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        last_s, sending = loop.time(), False

        async def write(body: bytes, more: bool = True) -> None:
            nonlocal last_s, sending
            sending = True
            await send({"type": "http.response.body", "body": body, "more_body": more})
            last_s, sending = loop.time(), False

        async def ping() -> None:
            while True:
                await asyncio.sleep(max(last_s + self._ping_s - loop.time(), 0.01))
                if not sending and loop.time() >= last_s + self._ping_s:
                    await write(PING)

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pings = asyncio.ensure_future(ping())
        try:
            async for piece in self._events:
                if piece:
                    await write(piece.encode())
            last = DONE
        except Exception as error:
            last = error_events(as_api_error(error))
        finally:
            pings.cancel()
            await self._events.aclose()  # pyright: ignore[reportAttributeAccessIssue]  a generator
        await write(last.encode(), more=False)


async def until_disconnect(receive: Receive) -> None:
    """Waits until the client of a request, whose body has been read, leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
