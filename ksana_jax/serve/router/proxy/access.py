"""Access rules of the proxy: clients' keys, its operators' key, and refused paths. Serves nothing."""

from __future__ import annotations

import re

from aiohttp import web

from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.server.auth import OPEN_PATHS, bearer_key, salt_of_key
from ksana_jax.serve.server.errors import APIError
from ksana_jax.serve.server.hosts import check_host, is_loopback, is_private

# Paths of operators, and the headers of a proxy that forwards another machine's request to this one.
ADMIN_PATH = re.compile("/servers(/.*)?")
FORWARDED = ("Forwarded", "X-Forwarded-For")
_DOTS = re.compile(r"(^|[/\\])\.\.?([/\\]|$)")


class Access:
    """Checks requests against the keys of the settings."""

    def __init__(self, settings: ProxySettings):
        self._keys = [key.encode() for key in settings.api_keys]
        self._admin_keys = [key.encode() for key in settings.admin_keys]
        self._salts = {key: salt_of_key(key) for key in self._keys}
        # A proxy open to other machines is reached by name; one with keys answers no page.
        private = is_private(settings.host)
        self._hosts = {host.lower() for host in settings.allowed_hosts} if private and not self._keys else None

    @property
    def has_keys(self) -> bool:
        """True if clients need a key."""
        return bool(self._keys)

    def check(self, request: web.Request) -> str:
        """Checks that a request may be answered; returns the salt of its client's key, empty where there are no keys.

        Raises:
          APIError: status 401 or 403: its key is missing, or does not suffice, or it asks by a name that is not the
            proxy's. 404: its path has dot segments, with which a name could reach other paths of a server. 415: it
            changes something, and may come from any web page.
        """
        if _DOTS.search(request.path):
            raise APIError(404, f"path {request.path!r:.200} does not exist", code="path_not_found")
        if self._hosts is not None and request.path not in OPEN_PATHS:
            check_host(request.host, self._hosts)
        admin = ADMIN_PATH.fullmatch(request.path) is not None
        if admin and self._admin_keys:
            self._key_of(request, self._admin_keys, "admin")
        elif self._keys and request.path not in OPEN_PATHS:
            salt = self._salts[self._key_of(request, self._keys, "API")]
            if not admin:
                return salt
        if admin and not self._admin_keys:
            _check_local(request)
        if admin and request.method == "POST" and request.content_type != "application/json":
            # Web pages can send other types to a proxy on their visitor's machine.
            raise APIError(415, f"content-type is {request.content_type!r:.80}, must be application/json")
        return ""

    def _key_of(self, request: web.Request, keys: list[bytes], kind: str) -> bytes:
        """Returns the key that a request carries; raises APIError, status 401, if it is none of `keys`."""
        given = [value.encode("utf-8", "replace") for value in request.headers.getall("Authorization", [])]
        if (key := bearer_key(given, keys)) is None:
            raise APIError(401, f"no valid {kind} key: send Authorization: Bearer KEY", code="invalid_api_key")
        return key


def _check_local(request: web.Request) -> None:
    """Checks that an operator without a key asks from this machine, and not through another proxy."""
    check_host(request.host)
    if not is_loopback(request.remote or "") or any(name in request.headers for name in FORWARDED):
        raise APIError(
            403,
            f"{request.path!r:.80} is answered without an admin key only on the proxy's machine: start it with "
            "--admin-key-file",
            code="admin_key_required",
        )
