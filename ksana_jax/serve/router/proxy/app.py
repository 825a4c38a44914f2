"""The proxy's HTTP interface: paths, keys, errors. `make_app` returns the application, `running` serves it.

aiohttp serves it, in C where uvicorn with h11 is Python: 0.25 against 0.6 ms of a core for a short request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web

from ksana_jax import __version__
from ksana_jax.serve.router import RoutedRequest
from ksana_jax.serve.router.proxy.access import Access
from ksana_jax.serve.router.proxy.answers import error_response, json_response
from ksana_jax.serve.router.proxy.exchange import Exchange, passed_back
from ksana_jax.serve.router.proxy.fleet import Fleet, Server, what_failed
from ksana_jax.serve.router.proxy.metrics import exposition
from ksana_jax.serve.router.proxy.prefixes import ConfiguredPrefixes
from ksana_jax.serve.router.proxy.prompts import PromptReader
from ksana_jax.serve.router.proxy.queueing import RequestQueue
from ksana_jax.serve.router.proxy.reading import RequestReader, model_of
from ksana_jax.serve.router.proxy.settings import EXACT
from ksana_jax.serve.server.auth import salt_of_key
from ksana_jax.serve.server.connections import Connections, default_limit
from ksana_jax.serve.server.errors import APIError

log = logging.getLogger("ksana_jax.serve.router.proxy")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Paths that every server answers equally.
ANYWHERE = (("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/tokenizer_info"))
PASSED_ON = ("Content-Type", "Accept", "User-Agent")
# The client's identity: servers see one key for all clients, and divide their prefix caches by this.
CLIENT = "X-Ksana-Client"
# The request's id, and the salt of its client's key.
ID, WHO = web.RequestKey("id", str), web.RequestKey("client", str)
REQUEST_ID = re.compile(r"[!-~]{1,128}")
MAX_HEADER_BYTES = 16 * 2**10
# Timeout in seconds of requests that any server answers.
ANYWHERE_S = 30.0


class Proxy:
    """State that all requests share.

    Args:
      fleet: the servers.
      prompts: tokenizes on this machine; None asks the servers.

    Attributes:
      draining: whether the proxy is ending, and refuses new requests. num_open: requests that are being answered.
      server_headers: with the key of the servers.
      prefixes: that were given for the policy's table; None without a file of them.
      names_of: models and adapters of servers, by URL; of those that report them.
      access: checks keys. connections: with clients; None until `running` listens.
    """

    def __init__(self, fleet: Fleet, prompts: PromptReader | None = None):
        self.fleet, self.settings = fleet, fleet.settings
        self.reader = RequestReader(prompts, self._ask_tokens, fleet.router.settings.block_size)
        self.turns = RequestQueue(self.settings, lambda: fleet.num_ready)
        fleet.on_room = self.turns.go_on
        if self.settings.num_queued:
            fleet.on_served = self.turns.queue.charge
        self.draining, self.num_open = False, 0
        self.access = Access(self.settings)
        self.connections: Connections | None = None
        server_key = self.settings.server_api_key
        self._server_salt = "" if server_key is None else salt_of_key(server_key.encode())
        self.server_headers = {} if server_key is None else {"Authorization": f"Bearer {server_key}"}
        self.prefixes: ConfiguredPrefixes | None = None
        self.names_of: Mapping[str, Collection[str]] = {}
        self._numbers = itertools.count()

    # ------------------------------------------------------------------ around every request

    @web.middleware
    async def around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the key, and answers errors as OpenAI's clients expect them."""
        given = request.headers.get("X-Request-Id", "")
        request[ID] = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        self.num_open += 1
        transport = request.transport
        if self.connections is not None:
            self.connections.began(transport)
        try:
            if client := self.access.check(request):
                request[WHO] = client
            answer = await handler(request)
        except APIError as error:
            answer = error_response(error)
        except web.HTTPException as error:
            answer = error_response(_told(request, error))
        except Exception:
            log.exception("request %s", request[ID])
            answer = error_response(APIError(500, "internal error of the proxy", code="internal_error"))
        finally:
            self.num_open -= 1
            if self.connections is not None:
                self.connections.ended(transport)
        if not answer.prepared:
            answer.headers["X-Request-Id"] = request[ID]
        return answer

    async def _body(self, request: web.Request) -> bytes:
        timeout_s = self.settings.client_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await request.read()
        except TimeoutError:
            raise APIError(408, f"the body did not arrive within {timeout_s:g} seconds") from None

    def _headers(self, request: web.Request) -> dict[str, str]:
        """Returns the headers of a request that a server gets."""
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers["X-Request-Id"] = request[ID]
        headers |= self.server_headers
        if not self.server_headers and not self.access.has_keys and "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        if WHO in request:
            headers[CLIENT] = request[WHO]
        return headers

    # ------------------------------------------------------------------ requests for tokens

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Passes a request for a completion to the best server."""
        if self.draining:
            raise APIError(503, "the proxy is shutting down", code="draining", retry_after_s=30)
        body = await self._body(request)
        client = request.get(WHO, "")
        salt, model = self._salt(request), self.reader.model
        prompt = await self.reader.read(request.path, body, salt)
        # An exact index hashes with the model's fingerprint, which a server's first event carries.
        if self.prefixes is not None and (model or self.settings.index != EXACT):
            self.prefixes.see(salt, model, self.fleet.clock())
        number = str(next(self._numbers))
        routed = RoutedRequest(number, prompt.num_tokens, prompt.hashes, prompt.max_tokens, client)
        async with self.turns.turn(client):
            others = self._without(prompt.model)
            return await Exchange(self.fleet, request, routed, body, self._headers(request), others).run()

    def _without(self, model: str | None) -> set[str]:
        """Returns the servers that do not serve a model; none if all say so, and one of them has to tell the client."""
        found = {url for url, names in self.names_of.items() if names and model is not None and model not in names}
        return found if any(s.weight > 0 and s.url not in found for s in self.fleet.servers.values()) else set()

    def _salt(self, request: web.Request) -> str:
        """Returns the salt under which a server will cache the prompt: see `serve.server.auth`."""
        if WHO in request:
            return f"{self._server_salt}.{request[WHO]}"
        given = request.headers.get("Authorization", "") if self.settings.server_api_key is None else ""
        return salt_of_key(given.partition(" ")[2].strip().encode()) if given else self._server_salt

    async def _ask_tokens(self, body: dict[str, Any]) -> list[int]:
        try:
            server = self._any_server(body.get("model"))
            async with self.fleet.session.post(server.url + "/tokenize", json=body, headers=self.server_headers) as got:
                if got.status in (400, 413, 422):
                    raise ValueError("the prompt is invalid")
                if got.status != 200:
                    raise OSError(f"server {server.name} does not tokenize: status {got.status}")
                return (await got.json())["tokens"]
        except (aiohttp.ClientError, APIError) as error:
            raise OSError(str(error)) from None

    async def served_models(self) -> set[str] | None:
        """Returns the names of the models that a server serves; None while none reports one."""
        try:
            server = self._any_server()
            async with self.fleet.session.get(server.url + "/v1/models", headers=self.server_headers) as got:
                return {*root_names((await got.json())["data"]).values()}
        except (aiohttp.ClientError, APIError, OSError, ValueError, LookupError, AttributeError, TypeError):
            return None

    # ------------------------------------------------------------------ requests that any server answers

    def _any_server(self, model: str | None = None) -> Server:
        others = self._without(model)
        ready = [one for one in self.fleet.servers.values() if one.weight > 0 and one.url not in others]
        if not ready:
            raise APIError(503, "no healthy server", code="no_healthy_server", retry_after_s=1)
        return self.fleet.dice.choice(ready)

    async def anywhere(self, request: web.Request) -> web.Response:
        """Passes a request to any server that is ready, and serves its model."""
        body = await self._body(request)
        server = self._any_server(request.query.get("model", model_of(body)))
        name = request.match_info.get("name")
        path = request.path if name is None else f"/v1/models/{quote(name, safe='')}"
        if request.query_string:
            path += f"?{request.rel_url.raw_query_string}"
        try:
            async with (
                asyncio.timeout(ANYWHERE_S),
                server.request(request.method, path, body or None, self._headers(request)) as got,
            ):
                return web.Response(body=await got.read(), status=got.status, headers=passed_back(got))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self.fleet.suspect(server)
            raise APIError(502, f"server {server.name} failed: {what_failed(error)}", code="server_failed") from None

    # ------------------------------------------------------------------ the proxy itself

    async def health(self, request: web.Request) -> web.Response:
        """Answers 200: the proxy runs, with servers or without."""
        return json_response({"status": "draining" if self.draining else "ready"})

    async def ready(self, request: web.Request) -> web.Response:
        """Answers 200 while there is a server to send requests to."""
        status = "draining" if self.draining else "ready" if self.fleet.num_ready else "no healthy server"
        return json_response({"status": status}, 200 if status == "ready" else 503)

    async def version(self, request: web.Request) -> web.Response:
        """Answers with the version of this program."""
        return json_response({"version": __version__})

    async def metrics(self, request: web.Request) -> web.Response:
        """Answers with metrics in Prometheus' text format."""
        text = exposition(self.fleet, len(self.turns.queue))
        return web.Response(text=text, content_type="text/plain", charset="utf-8")

    async def list_servers(self, request: web.Request) -> web.Response:
        """Answers with all servers and their state."""
        return json_response({"servers": [self._described(server) for server in self.fleet.servers.values()]})

    async def change_server(self, request: web.Request) -> web.Response:
        """Drains a server, or puts it back into service: POST /servers/HOST:PORT/drain, ..."""
        name, verb = request.match_info["name"], request.match_info["verb"]
        server = self.fleet.named(name)
        if server is None:
            known = ", ".join(server.name for server in self.fleet.servers.values())
            raise APIError(404, f"server {name!r:.200} does not exist; there are: {known}", code="server_not_found")
        (self.fleet.drain if verb == "drain" else self.fleet.resume)(server)
        return json_response(self._described(server))

    def _described(self, server: Server) -> dict[str, Any]:
        num_requests, state = len(server.carried), self.fleet.state(server)
        return {"id": server.name, "url": server.url, "state": state, "num_requests": num_requests}


def root_names(models: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the model behind each name in an answer of /v1/models, adapters left out."""
    return {str(model["id"]): str(model.get("root") or "") for model in models if not model.get("parent")}


def make_app(proxy: Proxy) -> web.Application:
    """Returns the application of a proxy."""
    app = web.Application(
        middlewares=[proxy.around],
        client_max_size=proxy.settings.max_body_bytes,
        handler_args={
            "max_line_size": MAX_HEADER_BYTES,
            "max_field_size": MAX_HEADER_BYTES,
            "lingering_time": min(10.0, proxy.settings.client_timeout_s),
        },
    )
    add = app.router.add_route
    add("POST", "/v1/completions", proxy.generate)
    add("POST", "/v1/chat/completions", proxy.generate)
    add("POST", "/v1/responses", proxy.generate)
    add("POST", "/v1/embeddings", proxy.generate)
    for method, path in ANYWHERE:
        add(method, path, proxy.anywhere)
    add("GET", "/v1/models/{name:.+}", proxy.anywhere)
    add("GET", "/health", proxy.health)
    add("GET", "/ready", proxy.ready)
    add("GET", "/version", proxy.version)
    add("GET", "/metrics", proxy.metrics)
    add("GET", "/servers", proxy.list_servers)
    add("POST", "/servers/{name}/{verb:drain|resume}", proxy.change_server)
    return app


@contextlib.asynccontextmanager
async def running(proxy: Proxy) -> AsyncIterator[str]:
    """Serves a proxy while the context is open; yields its address. At the end, open requests are cut: see `drain`."""
    settings = proxy.settings
    # A client that leaves cancels its request, and with it the request to the server.
    runner = web.AppRunner(make_app(proxy), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    assert runner.server is not None
    most = settings.max_connections or default_limit()
    proxy.connections = Connections(runner.server, settings.client_timeout_s, most)
    try:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(proxy.connections, settings.host, settings.port, backlog=1024)
        host, port = listening.sockets[0].getsockname()[:2]
        try:
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            listening.close()
    finally:
        await runner.cleanup()
        proxy.reader.close()


async def drain(proxy: Proxy, timeout_s: float) -> bool:
    """Refuses new requests and waits for those under way; returns whether all of them ended in time."""
    proxy.draining = True
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while proxy.num_open and loop.time() < end:
        await asyncio.sleep(0.02)
    return not proxy.num_open


def _told(request: web.Request, error: web.HTTPException) -> APIError:
    """Returns an error of aiohttp's routing as one of ours."""
    path, method = request.path, request.method
    if error.status == 404:
        return APIError(404, f"path {path!r:.200} does not exist", code="path_not_found")
    if error.status == 405:
        return APIError(405, f"{path!r:.200} does not take {method!r:.20}", code="method_not_allowed")
    if error.status == 413:
        return APIError(413, f"the body has more bytes than max_body_bytes: {error.text}", code="body_too_large")
    return APIError(error.status, error.reason)
