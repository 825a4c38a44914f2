"""Keeps requests without an API key from everything but a few paths, as ASGI middleware."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from ksana_jax.serve.server.errors import APIError

# The proxy's client. It only divides the prefix cache of the proxy's key further: a forged one gains nothing.
CLIENT = b"x-ksana-client"
_CLIENT_NAME = re.compile(rb"[!-~]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready"})
# Paths of the server's owner begin so.
SESSION_PATHS = "/sessions/"
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
ADMIN_PATHS = (SESSION_PATHS, *ADAPTER_PATHS)


def salt_of_key(key: bytes) -> str:
    """Returns the cache salt of an API key: clients with other keys do not share its cached prefixes, and cannot tell
    from the time of an answer what is cached (CVE-2025-46570)."""
    return hashlib.sha256(b"ksana cache salt\0" + key).hexdigest()[:32]


def bearer_key(given: Sequence[bytes], keys: Collection[bytes]) -> bytes | None:
    """Returns which of the keys a request carries. given: values of its header Authorization, which must be one."""
    scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
    # All keys are compared, each in constant time.
    same = [key for key in keys if hmac.compare_digest(key, token.strip())]
    return same[0] if same and scheme.lower() == b"bearer" else None


class RequireKey:
    """Answers 401 to requests without one of the keys, for known and unknown paths.

    It reads scope["path"], as the routes do, and no URL built from headers: a forged Host has bypassed
    such checks elsewhere (CVE-2026-48746).

    Args:
      keys: without any, every request passes.
      open_paths: served without a key, exactly as written.
      admin_keys: of ADMIN_PATHS, in the place of the others; without any, there are no such paths.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Collection[str],
        open_paths: Collection[str] = OPEN_PATHS,
        admin_keys: Collection[str] = (),
    ):
        self._app, self._open = app, frozenset(open_paths)
        self._keys, self._admin_keys = ([key.encode() for key in given] for given in (keys, admin_keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admin = scope["type"] == "http" and self._admin_keys and scope["path"].startswith(ADMIN_PATHS)
        keys = self._admin_keys if admin else self._keys
        if scope["type"] == "http" and keys and scope["path"] not in self._open:
            given = [value for name, value in scope["headers"] if name == b"authorization"]
            if (key := bearer_key(given, keys)) is None:
                error = APIError(401, "no valid API key: send Authorization: Bearer KEY", code="invalid_api_key")
                response = error.response()
                response.headers["www-authenticate"] = "Bearer"
                return await response(scope, receive, send)
            scope["ksana.salt"] = salt_of_key(key)
        if scope["type"] == "http" and (client := _client_of(scope)):
            scope["ksana.salt"] = f"{scope.get('ksana.salt', '')}.{client}"
        await self._app(scope, receive, send)


def _client_of(scope: Scope) -> str:
    given = next((value for name, value in scope["headers"] if name == CLIENT), b"")
    return given.decode() if _CLIENT_NAME.fullmatch(given) else ""
