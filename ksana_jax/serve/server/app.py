"""The ASGI application: routes, errors, keys. `running` serves it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ksana_jax import __version__
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.serve.server import adapters, chat, completions, embeddings, page, responses, sessions, tokens
from ksana_jax.serve.server.auth import OPEN_PATHS, RequireKey
from ksana_jax.serve.server.errors import APIError, json_response
from ksana_jax.serve.server.generation import as_api_error
from ksana_jax.serve.server.hosts import CheckPages, is_private
from ksana_jax.serve.server.kv_events import kv_events
from ksana_jax.serve.server.metrics import CONTENT_TYPE
from ksana_jax.serve.server.openapi import document
from ksana_jax.serve.server.prompts import check_model
from ksana_jax.serve.server.settings import ServerSettings
from ksana_jax.serve.server.state import Serving, serving_of

# Headers of answers that pages of other origins may read.
_EXPOSED = ("x-request-id", "retry-after")
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def make_app(
    llm: AsyncLLM | None, settings: ServerSettings | None = None, middleware: Sequence[Middleware] | None = None
) -> Starlette:
    """Returns the application that serves a model.

    Args:
      llm: None for one that is still loading; `app.state.serving.begin(llm)` begins to serve it.
      middleware: what each request passes first; None takes `guards`.
    """
    settings = settings or ServerSettings()
    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", metrics),
        Route("/openapi.json", openapi),
        Route("/v1/models", models),
        Route("/v1/models/", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", completions.create, methods=["POST"]),
        Route("/v1/chat/completions", chat.create, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/embeddings", embeddings.create, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.tokenizer_info),
        Route("/kv_events", kv_events),
        *page.routes(),
        *(sessions.routes(settings.session_dir) if settings.session_dir is not None else ()),
        *(adapters.routes() if settings.admin_keys else ()),
    ]
    before = guards(settings) if middleware is None else middleware
    app = Starlette(routes=routes, middleware=before, exception_handlers={HTTPException: http_error})
    app.router.redirect_slashes = False
    app.state.serving = Serving(settings)
    if llm is not None:
        app.state.serving.begin(llm)
    return app


def guards(settings: ServerSettings) -> list[Middleware]:
    """Returns what each request passes first: ids, limits, keys, errors."""
    # A request with a key is no page's; allowed pages send a preflight request first, without the key.
    hosts = frozenset(map(str.lower, settings.allowed_hosts)) if is_private(settings.host) else None
    checks = [] if settings.api_keys else [Middleware(CheckPages, hosts=hosts, origins=settings.allowed_origins)]
    cors = {"allow_origins": settings.allowed_origins, "allow_methods": ("GET", "POST"), "allow_headers": ("*",)}
    return [
        Middleware(RequestIds),
        Middleware(LimitHeaders, most=settings.max_header_bytes),
        *checks,
        *([Middleware(CORSMiddleware, **cors, expose_headers=_EXPOSED)] if settings.allowed_origins else []),
        Middleware(
            RequireKey,
            keys=settings.api_keys,
            open_paths=OPEN_PATHS | {page.PAGE_PATH},
            admin_keys=settings.admin_keys,
        ),
        Middleware(Errors),
    ]


class RequestIds:
    """Gives each response an x-request-id: the request's, if it is printable, or a new one."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


class LimitHeaders:
    """Answers 431 to requests whose first line and headers are longer than `most` bytes."""

    def __init__(self, app: ASGIApp, most: int):
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            size += len(scope.get("raw_path", b"")) + len(scope["query_string"])
            if size > self._most:
                error = APIError(431, f"line and headers have {size:,} bytes, at most {self._most:,} are read")
                return await error.response()(scope, receive, send)
        await self._app(scope, receive, send)


class Errors:
    """Turns exceptions of endpoints into error responses; a client that has left gets none."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except ClientDisconnect:
            pass
        except Exception as error:
            if started:
                raise
            await as_api_error(error).response()(scope, receive, send)


async def http_error(request: Request, error: Exception) -> Response:
    """Answers errors of the router: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        told = APIError(404, f"path {path!r:.200} does not exist", code="path_not_found")
    elif error.status_code == 405:
        told = APIError(405, f"{path!r:.200} does not take {request.method!r:.20}", code="method_not_allowed")
    else:
        told = APIError(error.status_code, error.detail)
    response = told.response()
    response.headers.update(error.headers or {})
    return response


async def health(request: Request) -> Response:
    """Answers 200 while the engine can serve or will, 503 once it has failed or stalled."""
    status = serving_of(request).status
    return json_response({"status": status}, 503 if status in ("dead", "stalled") else 200)


async def ready(request: Request) -> Response:
    """Answers 200 while new requests are taken, 503 while the model loads, or the server shuts down."""
    serving: Any = serving_of(request)
    if (status := serving.status) == "loading":
        return json_response({"status": status, "progress": serving.progress}, 503)
    if status != "ready":
        return json_response({"status": status}, 503)
    left = sum(model.any_llm.stats().num_compiling for model in serving.models)
    return json_response({"status": status} | ({"progress": f"compiling {left} programs"} if left else {}))


async def metrics(request: Request) -> Response:
    """Answers with the metrics in Prometheus' format."""
    serving = serving_of(request)
    _ = serving.any_llm  # there are none during loading
    return Response(serving.metrics.render(), media_type=CONTENT_TYPE)


async def version(request: Request) -> Response:
    return json_response({"version": __version__})


async def openapi(request: Request) -> Response:
    """Answers with the OpenAPI document of this server."""
    return json_response(document(__version__, bool(serving_of(request).settings.api_keys)))


async def models(request: Request) -> Response:
    """Answers with the names under which the model is served, and its adapters."""
    serving = serving_of(request)
    names = *serving.model.names, *serving.model.adapters
    return json_response({"object": "list", "data": [described(serving, name) for name in names]})


async def model(request: Request) -> Response:
    """Answers with one name of the model, or an adapter."""
    serving, name = serving_of(request), request.path_params["name"]
    check_model(serving.model, name)
    return json_response(described(serving, name))


def described(serving: Serving, name: str) -> dict[str, object]:
    """Returns the facts about one name of a model, or about an adapter."""
    served, adapters = serving.model, serving.any_llm.engine.factory.adapters
    adapter = served.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "ksana_jax",
        "root": served.names[0],
        "parent": None if adapter is None else served.names[0],
        "adapter_digest": None if adapter is None or adapters is None else adapters.digest_of(adapter),
        "max_model_len": served.max_model_len,
        "state": "asleep" if serving.any_llm.engine.asleep is not None else "awake",
        "has_chat_template": served.tokenizer is not None and served.tokenizer.chat_template is not None,
    }
