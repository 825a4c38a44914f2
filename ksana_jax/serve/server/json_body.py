"""Reads the JSON object in a request's body, within limits of bytes, time, depth and values. Knows no fields."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from ksana_jax.serve.server.errors import APIError, bad_request
from ksana_jax.serve.server.settings import ServerSettings
from ksana_jax.serve.server.state import serving_of
from ksana_jax.serve.server.validation import M, validate

T = TypeVar("T")

MAX_DEPTH = 32
# json.loads reads 10 million values a second and holds the interpreter meanwhile; event loop and engine wait for it.
MAX_VALUES = 2**18
# Keys of all objects together; an empty object counts as one. A full garbage collection takes 0.1 s for 2**18 objects.
MAX_KEYS = 2**15
# A body that is this many times too long is read to its end and dropped, so that its client gets the answer: most read
# one only after they have sent everything, and a connection that is closed before loses it.
DISCARDED = 4
# Longer bodies are parsed and read in a thread.
_LONG = 2**16
# Key of a scope, for a `ParsedBody`.
BODY = "ksana.body"


async def read_request(request: Request, model: type[M]) -> M:
    """Returns the request in a body, which may be in the scope as BODY. Long bodies are read in another thread.

    Raises:
      APIError: it is no such request, or the body is no JSON object, too long, too deep, or does not come in time.
      ClientDisconnect: the client has left.
    """
    body = request.scope.pop(BODY, None) or await receive_object(request)
    return await _maybe_in_thread(request, body.is_long, validate, model, body.value)


class ParsedBody(NamedTuple):
    """The JSON object of a request; is_long: whether reading it takes a thread."""

    value: dict[str, Any]
    is_long: bool


async def receive_object(request: Request) -> ParsedBody:
    """Returns the JSON object in a request's body; raises what `read_request` raises."""
    body = await _receive(request, serving_of(request).settings)
    is_long = len(body) > _LONG
    return ParsedBody(await _maybe_in_thread(request, is_long, parse_object, body), is_long)


async def _maybe_in_thread(request: Request, is_long: bool, function: Callable[..., T], *args: Any) -> T:
    return await serving_of(request).in_thread(function, *args) if is_long else function(*args)


async def _receive(request: Request, settings: ServerSettings) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Other types would let any web page that a user visits send requests to a server on the user's machine.
    if kind != "application/json":
        raise APIError(415, f"content-type is {kind!r:.80}, must be application/json")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise bad_request(f"content-encoding is {coding!r:.80}, must be identity: compressed bodies are not read")
    try:
        async with asyncio.timeout(settings.client_timeout_s):
            return await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise APIError(408, f"the body did not arrive within {settings.client_timeout_s:g} seconds") from None


async def _read(request: Request, most: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > DISCARDED * most:
        raise _too_long(int(length), most)
    body, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            body += part
        elif size > DISCARDED * most:
            break
    if size > most:
        raise _too_long(size, most)
    return bytes(body)


def _too_long(size: int, most: int) -> APIError:
    return APIError(413, f"the body has {size:,} bytes or more, at most {most:,} are read")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parses a JSON object (RFC 8259), strictly: no NaN, no key twice, no half of a surrogate pair.

    Raises:
      APIError: it is something else, or exceeds MAX_DEPTH, MAX_VALUES or MAX_KEYS.
    """
    if (commas := body.count(b",")) >= MAX_VALUES:
        raise bad_request(f"the body has {commas:,} commas, at most {MAX_VALUES - 1:,} are read")
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_Objects(), parse_constant=_no_constant, parse_float=_number
        )
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 at byte {error.start:,}") from None
    except UnicodeEncodeError:
        raise bad_request("the body has a string with half of a surrogate pair") from None
    except RecursionError:
        raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    except ValueError as error:  # one of the hooks, or a number of too many digits
        raise bad_request(f"the body is not accepted: {str(error).partition(';')[0]}") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    _check_depth(value)
    return value


class _Objects:
    """Makes the objects of one body, as `object_pairs_hook`."""

    _count = 0

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._count += max(len(pairs), 1)
        if self._count > MAX_KEYS:
            raise ValueError(f"its objects have {self._count:,} keys or more, at most {MAX_KEYS:,} are read")
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))
            raise ValueError(f"key {twice!r:.80} appears twice in one object")
        return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _number(text: str) -> int | float:
    """Returns 16 for 16.0, which JSON does not distinguish."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _check_depth(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [inner for part in parts for inner in part if isinstance(inner, (dict, list))]
        if not level:
            return
    raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels")
