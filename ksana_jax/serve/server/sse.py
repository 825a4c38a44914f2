"""Server-sent events as texts: `data: {json}` and an empty line each, `data: [DONE]` at the end. Knows no engine."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Receive

from ksana_jax.serve.server.errors import APIError

DONE = "data: [DONE]\n\n"
PING = ": ping\n\n"
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


async def until_disconnect(receive: Receive) -> None:
    """Waits until the client of a request, whose body has been read, leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
