"""The web page at /, a chat and charts of requests, tokens and KV blocks, and the numbers that it draws, GET /live.

The page is page.html, page.css and page.js in one document that loads nothing else. It contains no data and is served
without a key; it asks for numbers and answers with the key that its reader types in.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ksana_jax.serve.server.errors import json_response
from ksana_jax.serve.server.state import Serving, serving_of

PAGE_PATH = "/"
_STYLE, _SCRIPT = "/* page.css */", "/* page.js */"


def routes() -> list[Route]:
    """Returns the routes of the page and of its numbers. Serve PAGE_PATH without a key."""
    return [Route(PAGE_PATH, page), Route("/live", live)]


async def page(request: Request) -> Response:
    """Answers with the page."""
    text, policy = document()
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "cache-control": "no-cache"}
    return Response(text, media_type="text/html", headers={**headers, "referrer-policy": "no-referrer"})


@functools.cache
def document() -> tuple[str, str]:
    """Returns the page, and its Content-Security-Policy: this style and this script by their hashes, requests to this
    server, and nothing else."""
    folder = Path(__file__).parent
    text, style, script = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    assert text.count(_STYLE) == text.count(_SCRIPT) == 1 and "</" not in style + script
    none = "".join(f"; {name} 'none'" for name in ("default-src", "base-uri", "form-action", "frame-ancestors"))
    policy = f"style-src {_hash(style)}; script-src {_hash(script)}; connect-src 'self'; img-src data:{none}"
    return text.replace(_STYLE, style).replace(_SCRIPT, script), policy


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


async def live(request: Request) -> Response:
    """Answers with the state of the server, and with `numbers` once its model is loaded."""
    serving = serving_of(request)
    found = {} if serving.status == "loading" else numbers(serving)
    return json_response({"status": serving.status, **found}, headers={"cache-control": "no-store"})


def numbers(serving: Serving) -> dict[str, Any]:
    """Returns counts of all engines, read while they run: they may be of two steps. Tokens count from the start."""
    llm, totals = serving.any_llm, serving.metrics.totals
    stats, pools = llm.stats(), [engine.scheduler.blocks for engine in llm.replicas.engines]
    return {
        "time_s": llm.engine.clock(),
        "requests": {"running": stats.num_running, "waiting": stats.num_waiting},
        "tokens": {
            "prompt": sum(one.num_prompt_tokens - one.num_cached_tokens for one in totals),
            "output": sum(one.num_generated_tokens for one in totals),
        },
        "blocks": {
            "total": sum(pool.num_blocks for pool in pools),
            "running": sum(pool.num_used for pool in pools),
            "cached": sum(pool.num_idle for pool in pools),
            "free": sum(pool.num_free for pool in pools),
        },
    }
