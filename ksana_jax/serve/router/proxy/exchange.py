"""One request's way through the proxy: to a server, back to the client, and to another server if the first one fails.

Bytes pass unparsed in both directions. A request is sent again only as long as its client has received nothing; after
that, a server's failure ends the stream with an error event and [DONE].
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Collection, Mapping

import aiohttp
from aiohttp import web

from ksana_jax.serve.router import NoServer, RoutedRequest
from ksana_jax.serve.router.health import RETRIED, retry_wait_s
from ksana_jax.serve.router.proxy.answers import error_response
from ksana_jax.serve.router.proxy.fleet import Fleet, Server, what_failed
from ksana_jax.serve.server.errors import APIError
from ksana_jax.serve.server.sse import error_events

# Bytes at the end of an answer that contain its usage.
TAIL = 2048
CACHED_TOKENS = re.compile(rb'"cached_tokens":\s*(\d+)')
# How an event with JSON begins, and how events end.
EVENT, EVENT_ENDS = b"data: {", (b"\n\n", b"\r\n\r\n")
EVENT_STREAM = "text/event-stream"
# Headers of a server that the proxy writes for itself.
KEPT_BACK = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server", "trailer"})


class _TryAnother(Exception):
    """A server failed or refused before the client received anything.

    Args:
      status: of its answer; None without one. answer: for the client if no other server helps.
    """

    def __init__(self, status: int | None, answer: web.Response):
        super().__init__(status)
        self.status, self.answer = status, answer


class _ClientLeft(Exception):
    """The client has disconnected."""


class Exchange:
    """One proxied request; `run` returns the answer, which a stream has already sent.

    Args:
      fleet: the servers. routed: what the router knows of the request.
      body, headers: what is sent to a server. others: servers that do not have its model.
    """

    def __init__(
        self,
        fleet: Fleet,
        request: web.Request,
        routed: RoutedRequest,
        body: bytes,
        headers: Mapping[str, str],
        others: Collection[str] = (),
    ):
        self._fleet, self._request, self._routed = fleet, request, routed
        self._body, self._headers, self._others = body, headers, others
        self._sent: web.StreamResponse | None = None  # once the client has received something
        self._tail = b""

    async def run(self) -> web.StreamResponse:
        """Sends the request to one server after the other until one answers it."""
        fleet, tried, failure = self._fleet, [], None
        while True:
            try:
                server = fleet.choose(self._routed, {*tried, *self._others})
            except NoServer:
                no_server = APIError(503, "no healthy server", code="no_healthy_server", retry_after_s=1)
                return failure or error_response(no_server)
            tried.append(server.url)
            try:
                return await self._through(server)
            except _TryAnother as error:
                failure = error.answer
                wait_s = retry_wait_s(len(tried), error.status, fleet.settings.max_retries, fleet.dice)
                if wait_s is None:
                    return failure
                fleet.num_retries[str(error.status or "connection")] += 1
            await asyncio.sleep(wait_s)

    async def _through(self, server: Server) -> web.StreamResponse:
        """Passes the request to one server and its answer to the client; raises _TryAnother."""
        cached_tokens = None
        try:
            # The fleet ends the timeout when the server dies.
            async with asyncio.timeout(None) as limit:
                with server.carrying(limit):
                    answer = await self._pass(server)
            cached_tokens = self._cached_tokens()
            return answer
        except _ClientLeft:
            assert self._sent is not None
            return self._sent
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            self._fleet.suspect(server)
            what = f"server {server.name} failed: {what_failed(error)}"
            if self._sent is None:
                raise _TryAnother(None, error_response(APIError(502, what, code="server_failed"))) from None
            return await self._break_off(what)
        finally:
            self._fleet.finished(self._routed, cached_tokens)

    async def _pass(self, server: Server) -> web.StreamResponse:
        async with server.request("POST", self._request.path, self._body, self._headers) as got:
            headers = passed_back(got)
            if got.headers.get("Content-Type", "").startswith(EVENT_STREAM) and got.status == 200:
                return await self._stream(server, got, headers)
            body = await got.read()
        answer = web.Response(body=body, status=got.status, headers=headers)
        if got.status in RETRIED:
            if got.status != 429:
                self._fleet.suspect(server)
            raise _TryAnother(got.status, answer)
        self._tail = body[-TAIL:]
        return answer

    async def _stream(
        self, server: Server, got: aiohttp.ClientResponse, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        answer = web.StreamResponse(status=got.status, headers=headers)
        routed, progress, begun = self._routed, self._fleet.progress, b""
        async for data in got.content.iter_any():
            server.health.sent()
            if begun or not data.endswith(EVENT_ENDS):
                # Only whole events are passed on, so that an error event can follow at any time.
                data = begun + data
                end = max((data.rfind(mark) + len(mark) for mark in EVENT_ENDS if mark in data), default=0)
                data, begun = data[:end], data[end:]
                if not data:
                    continue
            if self._sent is None:
                # Not before the first bytes arrive: until then, another server can take over.
                await self._write(answer.prepare(self._request))
                self._sent = answer
            if num_events := data.count(EVENT):
                progress(routed, num_events)
            self._tail = data if len(data) >= TAIL else (self._tail + data)[-TAIL:]
            await self._write(answer.write(data))
        if self._sent is None:
            raise aiohttp.ClientPayloadError("its stream ended without an event")
        if begun:
            await self._write(answer.write(begun))
        await self._write(answer.write_eof())
        return answer

    async def _write(self, writing) -> None:
        try:
            await writing
        except ConnectionError:  # which aiohttp raises for its own servers' connections too
            raise _ClientLeft from None

    async def _break_off(self, what: str) -> web.StreamResponse:
        """Ends a stream whose server failed."""
        assert self._sent is not None
        self._fleet.num_broken += 1
        error = APIError(502, f"{what}, after a part of the answer was sent", code="server_failed")
        with contextlib.suppress(ConnectionError):
            await self._sent.write(error_events(error).encode())
            await self._sent.write_eof()
        return self._sent

    def _cached_tokens(self) -> int | None:
        found = CACHED_TOKENS.findall(self._tail)
        return int(found[-1]) if found else None


def passed_back(got: aiohttp.ClientResponse) -> dict[str, str]:
    """Returns the headers of a server's answer that its client gets too."""
    return {name: value for name, value in got.headers.items() if name.lower() not in KEPT_BACK}
