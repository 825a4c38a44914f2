"""The proxy's own answers, with aiohttp, in the forms of `ksana serve`."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from ksana_jax.serve.server.errors import APIError


def error_response(error: APIError) -> web.Response:
    """Returns an error as OpenAI's clients expect it."""
    response = json_response(error.body, error.status, error.headers)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:
        response.force_close()  # without waiting for the rest of the body
    return response


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Returns a response of JSON."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")
