"""Shared by all replies: their first fields, and waiting for outputs while the client stays."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.engine.request_stream import RequestStream
from ksana_jax.serve.server.generation import closing, results
from ksana_jax.serve.server.model import ServedModel
from ksana_jax.serve.server.sse import until_disconnect


def head_of(model: ServedModel, prefix: str, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that all chunks of a reply share; values: of the request."""
    name, request_id = values["model"], values["request_id"]
    return {
        "id": f"{prefix}-{request_id or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": name if name in model.adapters else model.name,
        "system_fingerprint": model.fingerprint,
    }


def streams_usage(values: dict[str, Any]) -> tuple[bool, bool]:
    """Returns whether the last chunk, and whether each chunk of a stream has the usage."""
    options = values["stream_options"]
    in_each = options.get("continuous_usage_stats", False)
    return options.get("include_usage", False) or in_each, in_each


async def reply(
    request: Request, streams: Sequence[RequestStream], make: Callable[[list[RequestOutput]], Response]
) -> Response:
    """Waits for outputs and makes a response of them. Requests of a client that leaves are aborted.

    Raises:
      APIError: a completion was ended by a failure.
      ClientDisconnect: the client has left.
    """
    with closing(streams):
        ending = asyncio.ensure_future(results(streams))
        leaving = asyncio.ensure_future(until_disconnect(request.receive))
        try:
            await asyncio.wait((ending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                raise ClientDisconnect
            return make(ending.result())
        finally:
            leaving.cancel()
            ending.cancel()
