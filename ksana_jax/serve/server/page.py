"""The web page at /: live charts of the engines, and a box to try the model. One document, without a network.

The document is made of page.html, page.css and page.js beside this file. It contains no data and is served without a
key; it reads its data from the API, with the key that its reader types in.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ksana_jax.serve.server.live import live

PAGE_PATH, LIVE_PATH = "/", "/live"
_STYLE, _SCRIPT = "/* page.css */", "/* page.js */"


def routes() -> list[Route]:
    """Returns the routes of the page and of its data. Serve PAGE_PATH without a key."""
    return [Route(PAGE_PATH, page), Route(LIVE_PATH, live)]


async def page(request: Request) -> Response:
    """Answers with the page."""
    text, policy = document()
    return Response(
        text,
        media_type="text/html",
        headers={
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        },
    )


@functools.cache
def document() -> tuple[str, str]:
    """Returns the page, and its Content-Security-Policy: this style and this script by their hashes, requests to this
    server, and nothing else."""
    folder = Path(__file__).parent
    text, style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    assert text.count(_STYLE) == text.count(_SCRIPT) == 1 and "</" not in style + script
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    whole = text.replace(_STYLE, style).replace(_SCRIPT, script)
    return whole, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
