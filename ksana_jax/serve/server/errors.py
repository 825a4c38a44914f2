"""Errors as OpenAI's clients expect them. Knows HTTP, no engine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ksana_jax.core.errors import one_line

# Types of errors by status, as OpenAI names them.
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    502: "server_error",
    503: "service_unavailable_error",
}
# Statuses of requests that were not read to their end.
UNREAD = (408, 413, 431)


class APIError(Exception):
    """An error that is sent to the client.

    Args:
      status: of the HTTP response.
      message: names the field, its value and its limit, where there are any.
      param: the field that is wrong, if one is.
      code: a word for programs, such as "context_length_exceeded".
      retry_after_s: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, one_line(message), param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON values: {"error": {"message", "type", "param", "code"}}."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after_s is None else {"retry-after": str(max(math.ceil(self.retry_after_s), 1))}
        # The rest of the client's input is not read.
        return {**found, "connection": "close"} if self.status in UNREAD else found

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """Returns the error of a request that can never be served."""
    return APIError(400, message, param=param, code=code)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response of JSON. Clients of all kinds decode ASCII."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Response(text, status, headers, media_type="application/json")
