"""Checks the names that address a server, and the web pages that ask it. Serves nothing.

A page whose name leads to this machine (DNS rebinding) asks by its own name, and any page may send requests to a server
on its visitor's machine: without keys, only Host and Origin tell them from a user.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ksana_jax.serve.server.auth import OPEN_PATHS
from ksana_jax.serve.server.errors import APIError


def is_address(text: str) -> bool:
    """True if a host is an IP address, with or without a zone."""
    try:
        return bool(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return False


def is_loopback(text: str) -> bool:
    """True if a host is an address of the loopback, IPv4 mapped to IPv6 included."""
    if not is_address(text):
        return False
    address = ipaddress.ip_address(text.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def is_private(host: str) -> bool:
    """True if a server that listens on `host` can be reached from its own machine alone."""
    return host == "localhost" or is_loopback(host)


def check_host(given: str, allowed: Collection[str] = ()) -> None:
    """Checks the header Host of a request.

    Args:
      allowed: names besides localhost and addresses, in lower case.

    Raises:
      APIError: status 403: it has another name.
    """
    try:
        host = "" if "@" in given else urlsplit(f"//{given}").hostname or ""
    except ValueError:  # half a bracket
        host = ""
    if not (host == "localhost" or is_address(host) or host in allowed):
        raise APIError(
            403,
            f"Host is {given!r:.80}, must be localhost or an address; --allowed-hosts adds names",
            code="host_not_allowed",
        )


def check_origin(origin: str, host: str, allowed: Collection[str]) -> None:
    """Checks that a request of a web page comes from a page of this server, or of an origin in `allowed`.

    Raises:
      APIError: status 403: it does not.
    """
    if not (origin in allowed or "*" in allowed or origin.lower() in (f"http://{host}", f"https://{host}")):
        raise APIError(
            403,
            f"Origin is {origin!r:.80}, must be this server's own; --allowed-origins adds others",
            code="origin_not_allowed",
        )


class CheckPages:
    """Answers 403 to requests of web pages that are not the server's own, as ASGI middleware.

    Args:
      hosts: see `check_host`; None allows all names. origins: see `check_origin`, of requests that change something.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]):
        self._app, self._hosts, self._origins = app, hosts, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get(b"host"), headers.get(b"origin")
            try:
                if host is not None and self._hosts is not None:  # HTTP/1.0, which no browser speaks, has none
                    check_host(host, self._hosts)
                if origin is not None and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                    check_origin(origin, (host or "").lower(), self._origins)
            except APIError as error:
                return await error.response()(scope, receive, send)
        await self._app(scope, receive, send)
