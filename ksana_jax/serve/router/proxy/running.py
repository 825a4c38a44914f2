"""Runs the proxy: finds servers, serves until a signal comes, and lets requests under way end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from ksana_jax.core.errors import ConfigError, LoadError, system_reason
from ksana_jax.core.sources import model_path
from ksana_jax.serve.router import RouterSettings
from ksana_jax.serve.router.prefix_file import read_prefix_file
from ksana_jax.serve.router.proxy.app import Proxy, drain, running
from ksana_jax.serve.router.proxy.fleet import Fleet
from ksana_jax.serve.router.proxy.following import EventFollower
from ksana_jax.serve.router.proxy.models import SameModel
from ksana_jax.serve.router.proxy.prefixes import ConfiguredPrefixes
from ksana_jax.serve.router.proxy.prompts import PromptReader
from ksana_jax.serve.router.proxy.settings import EXACT, ProxySettings
from ksana_jax.tokenizers import find_tokenizer

log = logging.getLogger("ksana_jax.serve.router.proxy")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def route(
    settings: ProxySettings, router_settings: RouterSettings | None = None, servers: Sequence[str] = ()
) -> None:
    """Serves until SIGTERM or Ctrl-C; the second one ends requests under way.

    Args:
      servers: their addresses.

    Raises:
      ConfigError: a setting is invalid, or servers serve different models.
    """
    stopping, aborting = asyncio.Event(), asyncio.Event()
    with handling(lambda: (aborting if stopping.is_set() else stopping).set()):
        async with routing(settings, router_settings, servers) as (proxy, url):
            say(f"routing by {settings.policy} on {url} to {len(servers)} servers")
            for server in proxy.fleet.servers.values():
                if server.trouble:
                    say(
                        f"server {server.name} is not ready: {server.trouble}; it is asked every {settings.probe_s:g} s"
                    )
            await stopping.wait()
            await _end(proxy, aborting)


@contextlib.asynccontextmanager
async def routing(
    settings: ProxySettings, router_settings: RouterSettings | None = None, servers: Sequence[str] = ()
) -> AsyncIterator[tuple[Proxy, str]]:
    """Serves while the context is open; yields the proxy, whose fleet takes further servers, and its address.

    Raises:
      ConfigError: see `route`.
    """
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(settings, router_settings))
        proxy = Proxy(fleet, _tokenizes(settings.tokenizer))
        if settings.prefix_file is not None:
            given = read_prefix_file(settings.prefix_file)
            proxy.prefixes = ConfiguredPrefixes(fleet.router, given, servers)
        if settings.index == EXACT:
            EventFollower(fleet, proxy.reader, proxy.server_headers)
        try:
            url = await stack.enter_async_context(running(proxy))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {settings.host} port {settings.port}: {system_reason(error)}"
            ) from None
        await asyncio.gather(*map(fleet.add, servers))
        models = SameModel(proxy)
        await models.check()
        for watching in (_learn_tokenizer(proxy), models.watch(settings.probe_s)):
            stack.callback(asyncio.create_task(watching).cancel)
        if proxy.prefixes is not None:
            stack.callback(asyncio.create_task(proxy.prefixes.tokenize(proxy.reader)).cancel)
        yield proxy, url


def say(text: str) -> None:
    """Shows a line to the user of the command."""
    print(f"ksana: {text}", file=sys.stderr, flush=True)


async def _end(proxy: Proxy, aborting: asyncio.Event) -> None:
    """Waits for the requests under way, until their time is up or a second signal comes."""
    timeout_s = proxy.settings.shutdown_timeout_s
    if proxy.num_open:
        say(f"shutting down: {proxy.num_open} requests have {timeout_s:g} seconds to end; another signal ends them")
    draining, abort = asyncio.create_task(drain(proxy, timeout_s)), asyncio.create_task(aborting.wait())
    await asyncio.wait((draining, abort), return_when=asyncio.FIRST_COMPLETED)
    draining.cancel()
    abort.cancel()
    for server in proxy.fleet.servers.values():  # unfinished requests end with an error
        proxy.fleet.died(server)
    await asyncio.sleep(0.1)


async def _learn_tokenizer(proxy: Proxy) -> None:
    """Finds the tokenizer of the served model on this machine, if it was not given; servers are asked otherwise."""
    while not proxy.reader.tokenizes:
        if names := await proxy.served_models():
            if len(names) == 1:  # several have several tokenizers
                with contextlib.suppress(ValueError, OSError):
                    proxy.reader.use(_tokenizes(*names, download=False))
            where = "on this machine" if proxy.reader.tokenizes else "by the servers"
            log.info("prompts for %s are tokenized %s", ", ".join(sorted(names)), where)
            return
        await asyncio.sleep(0.5)


def _tokenizes(model: str | None, download: bool = True) -> PromptReader | None:
    """Returns the reader of a model's prompts; None if none is named, or it has no tokenizer here.

    Args:
      download: False if a server chose the name.
    """
    if model is None:
        return None
    try:
        path = model_path(model, weights=False, download=download)
    except LoadError:  # servers elsewhere may have it
        return None
    tokenizer = find_tokenizer(path)
    return None if tokenizer is None else PromptReader(tokenizer)


@contextlib.contextmanager
def key_file(key: str) -> Iterator[Path]:
    """Writes a key to a file that only this user can read."""
    with tempfile.TemporaryDirectory(prefix="ksana-route-") as folder:
        path = Path(folder) / "key"
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(key + "\n")
        yield path


@contextlib.contextmanager
def handling(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` at each SIGTERM and Ctrl-C while the context is open."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def run(serving: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine on uvloop, which halves the cost of an event, if it is installed; else on asyncio's loop.

    Events of servers are shown on stderr.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("ksana: %(message)s"))
    log.addHandler(handler)
    log.propagate = False
    try:
        import uvloop  # pyright: ignore[reportMissingImports]
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)
