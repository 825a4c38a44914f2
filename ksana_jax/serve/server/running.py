"""Runs the server: listens while the model loads, serves it, and lets accepted requests end before it stops.

The first SIGTERM or Ctrl-C refuses new requests and waits for those accepted, at most shutdown_timeout_s; a second one
aborts them. Either way, every stream gets its end or an error event, and the exit code is 0. An engine that has failed
ends the server with exit code 1, so that a supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from ksana_jax.core.errors import ConfigError, one_line, system_reason
from ksana_jax.core.units import byte_size
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.ops.pool import EXACT_CODECS
from ksana_jax.runner import compiling
from ksana_jax.serve.server.app import make_app
from ksana_jax.serve.server.protocol import protocol_factory
from ksana_jax.serve.server.settings import ServerSettings
from ksana_jax.serve.server.state import Serving

# The engine of a model, or of several.
Loaded = AsyncLLM | Sequence[AsyncLLM]
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds for events that end aborted streams to reach their clients, between words on compiling, and between looks at
# the engine's health.
LAST_WORDS_S = 5.0
PROGRESS_S = 5.0
WATCH_S = 0.5

logger = logging.getLogger("ksana_jax")


class _Server(uvicorn.Server):
    """uvicorn without its handlers of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(settings: ServerSettings) -> socket.socket:
    """Returns a socket that listens on the host and port of the settings.

    Raises:
      ConfigError: the address does not exist, or is in use.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        # Inherited by its connections. asyncio sets it only for sockets that name their protocol, unlike this one, and
        # without it a small event waits until the client has acknowledged the one before: up to 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return listener
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {system_reason(error)}") from None


def http_server(app: ASGIApp, settings: ServerSettings) -> uvicorn.Server:
    """Returns the HTTP server of an application; it runs on the event loop that calls its `serve`.

    uvicorn and h11 refuse malformed requests, stop to read a body of which the application has not taken 64 KiB, answer
    one request of a connection at a time, close it after 5 idle seconds, and refuse line and headers that are longer
    than max_header_bytes and incomplete. The rest is limited here: line and headers that come whole (`LimitHeaders`),
    seconds for a request's head and for reading an answer (`connections`), bytes and seconds of a body (`json_body`),
    waiting work (`limits`), and names and pages that ask (`hosts`; TrustedHostMiddleware knows no addresses).
    """
    config = uvicorn.Config(
        app,
        http=protocol_factory(settings.client_timeout_s),  # pyright: ignore[reportArgumentType]  a factory is enough
        loop="asyncio",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="error",
        server_header=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_graceful_shutdown=int(LAST_WORDS_S),
    )
    return _Server(config)


def serve(
    load: Callable[[], Loaded], settings: ServerSettings, listener: socket.socket, app: Starlette | None = None
) -> int:
    """Loads a model and serves it until a signal comes, or the engine fails.

    Args:
      load: called in another thread; /health and /ready are answered meanwhile.
      listener: from `listen`.
      app: the application, see `RunningServer`.

    Returns:
      The exit code of the process: 0 after a signal, 1 after a failure of the engine.

    Raises:
      Exception: raised by `load`.
    """

    def load_and_freeze() -> Loaded:
        llm = load()
        # These objects are permanent: scanning them in each full collection would stop all streams for 0.1 s.
        gc.collect()
        gc.freeze()
        return llm

    return asyncio.run(RunningServer(load_and_freeze, settings, listener, app).run())


class RunningServer:
    """A server from its start to its end; see `serve`.

    Args:
      app: of a model that is still loading, or from `several.make_several_app`, for which `load` returns as many; None
        makes one for a model.

    Attributes:
      app: the ASGI application. stop: called for each signal.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        settings: ServerSettings,
        listener: socket.socket,
        app: Starlette | None = None,
    ):
        self._load, self._settings, self._listener = load, settings, listener
        self.app = app or make_app(None, settings)
        self._serving: Any = self.app.state.serving  # a Serving, or a Several
        self._signals, self._told_s = 0, 0.0

    async def run(self) -> int:
        """Serves until the end; returns the exit code."""
        self._loop = asyncio.get_running_loop()
        self._stopping, self._aborting = asyncio.Event(), asyncio.Event()
        self._server = http_server(self.app, self._settings)
        with self._handling_signals():
            self._serving.lag.start()
            _say(f"listening on {self._url()}, loading the model")
            listening = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
            try:
                return await self._serve_model()
            finally:
                self._server.should_exit = True
                await listening
                self._serving.lag.stop()

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in SIGNALS:
            self._loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in SIGNALS:
                self._loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Begins to drain; a second call aborts the remaining requests. On the event loop."""
        self._signals += 1
        (self._stopping if self._signals == 1 else self._aborting).set()

    async def _serve_model(self) -> int:
        stopping = asyncio.ensure_future(self._stopping.wait())
        loading = self._loaded()
        await asyncio.wait((stopping, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            # The loading thread cannot be stopped, and Python would wait for device code in it.
            _say("stopped while loading")
            os._exit(0)
        self._serving.begin(loading.result())
        models: list[Serving] = self._serving.models
        llms = [serving.any_llm for serving in models]
        for serving in models:
            for line in _memory(serving.any_llm):
                _say(line if len(models) == 1 else f"{serving.model.name}, {_state(serving.any_llm)}: {line}")
        _say(f"serving {', '.join(serving.model.name for serving in models)} on {self._url()}")
        compiling = 0
        while not self._stopping.is_set() and all(llm.is_alive for llm in llms):
            before, compiling = compiling, sum(llm.stats().num_compiling for llm in llms)
            if (compiling == 0) != (before == 0):
                _say(f"compiling {compiling} programs in the background" if compiling else "all programs are compiled")
            await asyncio.wait((stopping,), timeout=WATCH_S)
        stopping.cancel()
        if dead := [llm for llm in llms if not llm.is_alive]:
            _say(f"error: the engine has failed: {dead[0].error}")
            await asyncio.sleep(WATCH_S)  # streams tell their clients
            return 1
        await self._drain(llms)
        return 0

    def _url(self) -> str:
        host, port, *_ = self._listener.getsockname()
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _compiling(self, number: int, count: int) -> None:
        """Reports the progress of compilation on standard error every few seconds; in the loading thread."""
        self._serving.progress = f"compiling {number} of {count}"
        if number in (1, count) or time.monotonic() - self._told_s > PROGRESS_S:
            self._told_s = time.monotonic()
            _say(self._serving.progress)

    def _loaded(self) -> asyncio.Future[Loaded]:
        """Starts loading in a daemon thread, which does not delay the process's exit."""
        found: asyncio.Future[Loaded] = self._loop.create_future()

        def load() -> None:
            compiling.watchers.append(self._compiling)
            try:
                llm, error = self._load(), None
            except BaseException as raised:
                llm, error = None, raised
            finally:
                compiling.watchers.remove(self._compiling)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(_resolve, found, llm, error)

        threading.Thread(target=load, name="ksana-load", daemon=True).start()
        return found

    async def _drain(self, llms: Sequence[AsyncLLM]) -> None:
        """Waits until accepted requests have ended; aborts those that take too long."""
        self._serving.draining = True
        num, timeout_s = _num_requests(llms), self._settings.shutdown_timeout_s
        _say(f"shutting down: {num} requests have {timeout_s:g} seconds to end; another signal aborts them")
        draining = asyncio.gather(*(llm.drain(timeout_s) for llm in llms))
        aborting = asyncio.ensure_future(self._aborting.wait())
        await asyncio.wait((draining, aborting), return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        aborting.cancel()
        if num := _num_requests(llms):
            _say(f"aborting {num} requests")
        await asyncio.gather(*(llm.aclose() for llm in llms))


def _num_requests(llms: Sequence[AsyncLLM]) -> int:
    return sum(llm.stats().num_requests for llm in llms)


def _state(llm: AsyncLLM) -> str:
    return "awake" if llm.engine.asleep is None else "asleep"


def _memory(llm: AsyncLLM) -> list[str]:
    """Returns a line on the memory of a model; none for an engine without one."""
    if llm.llm is None:
        return []
    plan, config = llm.llm.memory_plan, llm.config
    dtype = config.kv_cache_dtype
    if dtype == "auto":
        dtype = EXACT_CODECS[str(next(iter(llm.llm.runner.cache.leaves.values())).dtype)]
    tokens = llm.stats().num_blocks * config.block_size
    pool = f"KV pool {byte_size(plan.pool_bytes)} for {tokens:,} tokens in {dtype}"
    return [f"memory: weights {byte_size(plan.weights_bytes)}, {pool}"]


def _resolve(future: asyncio.Future, result: object, error: BaseException | None) -> None:
    if not future.done():
        future.set_result(result) if error is None else future.set_exception(error)


def _say(text: str) -> None:
    print(f"ksana: {one_line(text)}", file=sys.stderr, flush=True)
