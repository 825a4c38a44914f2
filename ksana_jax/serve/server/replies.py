"""Shared by all replies: their first fields, and waiting for outputs while the client stays."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.engine.request_stream import RequestStream
from ksana_jax.serve.server.generation import closing, results
from ksana_jax.serve.server.model import ServedModel
from ksana_jax.serve.server.request_models import EmbeddingRequest, Generation
from ksana_jax.serve.server.sse import until_disconnect


def head_of(model: ServedModel, prefix: str, kind: str, asked: Generation | EmbeddingRequest) -> dict[str, Any]:
    """Returns the fields that all chunks of a reply share."""
    return {
        "id": f"{prefix}-{asked.request_id or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": asked.model if asked.model in model.adapters else model.name,
        "system_fingerprint": model.fingerprint,
    }


def streams_usage(asked: Generation) -> tuple[bool, bool]:
    """Returns whether the last chunk, and whether each chunk of a stream has the usage."""
    options = asked.stream_options
    return options.include_usage or options.continuous_usage_stats, options.continuous_usage_stats


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
