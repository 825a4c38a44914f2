"""A Ray Serve application: servers of one model as replicas, and the proxy of `ksana route` as its ingress.

    serve run ksana_jax.serve.on_ray_serve:app model=ksana-tiny replicas=1-4 block_size=8 policy=min_ttft

Serve places the servers, restarts, scales and upgrades them. A request passes Serve once, at the ingress, which sends
it straight to the HTTP port of the server that the policy chooses: no token passes an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import math
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import aiohttp
import ray  # pyright: ignore[reportMissingImports]
import yaml
from prometheus_client.parser import text_string_to_metric_families
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.serve import config  # pyright: ignore[reportMissingImports]
from ray.serve.request_router import RequestRouter  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import StreamingResponse

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router import RouterSettings
from ksana_jax.serve.router.proxy.fleet import Server as FleetServer
from ksana_jax.serve.router.proxy.running import handling, key_file, routing, say
from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.router.proxy.spawning import (
    LOCALHOST,
    STOP_S,
    die_with_parent,
    free_port,
    read_replicas,
    serve_command,
    why_ended,
)

LOOK_S = 0.2
# Metrics of a server; one with several engines has a sample of each.
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
# Share of the KV pool in use above which one more server is asked for.
FULL_POOL = 0.9
HEALTH_S, HEALTH_TIMEOUT_S = 2.0, 10.0
NAME = "ksana"
MOST_STARTS = 3  # of a server that ends before it is ready
# Headers of one connection alone; the proxy sets its own.
HOP_BY_HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding", "upgrade"}


class Server:
    """A replica: `ksana serve` on this node, on a port of its own.

    Args:
      words: what follows the model in the command. key: that requests must have; None for none.
      host: the address on which it listens; None takes the node's own.

    Raises:
      RuntimeError: it ended before it was ready, with its last line.
    """

    async def __init__(
        self, model: str, words: Sequence[str], key: str | None, shutdown_timeout_s: float, host: str | None = None
    ):
        host = host or ray.util.get_node_ip_address()
        port, self._stop_s, self._last = free_port(host), shutdown_timeout_s + STOP_S, ""
        self._files = contextlib.ExitStack()
        file = None if key is None else self._files.enter_context(key_file(key))
        self._process = subprocess.Popen(
            [*serve_command(model, words, file, shutdown_timeout_s, host), "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._session = aiohttp.ClientSession(
            headers=_authorization(key), timeout=aiohttp.ClientTimeout(total=HEALTH_S)
        )
        while not await self._is_ready():
            await self.check_health()
            await asyncio.sleep(LOOK_S)

    async def address(self) -> str:
        """Returns the server's address."""
        return self._url

    def record_replica_metadata(self) -> dict[str, str]:
        """Returns what the ingress has to know; called by Serve once the server is ready."""
        return {"url": self._url}

    async def check_health(self) -> None:
        """Raises RuntimeError once the process has ended; called by Serve, which then starts another replica."""
        if (code := self._process.poll()) is not None:
            self._reader.join(1.0)
            raise RuntimeError(why_ended(code, self._last))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the server's requests, and the share of its KV pool in use; called by Serve where it scales."""
        async with self._session.get(self._url + "/metrics") as got:
            families = text_string_to_metric_families(await got.text())
        found = [(sample.name, sample.value) for family in families for sample in family.samples]
        pools = [value for name, value in found if name == "vllm:kv_cache_usage_perc"]
        return {"requests": sum(value for name, value in found if name in REQUESTS), "pool": max(pools, default=0.0)}

    def __del__(self) -> None:
        """Ends the server when its requests have ended, or by force; called by Serve, which has told the ingress."""
        process: subprocess.Popen | None = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(self._stop_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._files.close()

    async def _is_ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(self._url + "/ready") as got:
                return got.status == 200
        return False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last = line.rstrip()[:2000]
            print(self._last, flush=True)  # into Ray's log of the replica


# Called with the addresses of all running replicas when they change, in any thread.
_watchers: list[Callable[[Sequence[str]], object]] = []


class ServerList(RequestRouter):
    """Tells the ingress, in whose process Serve makes it, which servers run. It chooses none itself."""

    def update_replicas(self, replicas: list[Any]) -> None:
        """See `RequestRouter`."""
        # Serve has pickled this class by value, and the globals of its module with it: they are copies.
        from ksana_jax.serve import on_ray_serve

        super().update_replicas(replicas)
        for watcher in on_ray_serve._watchers:
            watcher([replica.replica_metadata["url"] for replica in replicas])

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """See `RequestRouter`."""
        return [candidate_replicas]


class Ingress:
    """The proxy of `ksana route`, whose servers are the replicas of a deployment. Each ingress has an index of its own.

    Args:
      servers: handle of the deployment of `Server`.
    """

    async def __init__(self, servers: Any, settings: ProxySettings, router_settings: RouterSettings):
        self._stack, self._tasks = contextlib.AsyncExitStack(), set()
        proxy, self._url = await self._stack.enter_async_context(routing(settings, router_settings))
        self._fleet, self._began = proxy.fleet, False
        self._looks = round(settings.queue_timeout_s / LOOK_S)  # that a request takes until there is a server
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=2**18,
            )
        )
        loop = asyncio.get_running_loop()
        _watchers.append(lambda urls: loop.call_soon_threadsafe(self._follow, frozenset(urls)))
        await servers.address.remote()  # the handle's first use has it learn the replicas
        while not self._fleet.num_ready:
            await asyncio.sleep(LOOK_S)
        self._began = True

    async def __call__(self, request: Request) -> StreamingResponse:
        """Passes a request to the proxy, and its answer back as it comes."""
        # Serve upgrades a single server by ending it first.
        for _ in range(self._looks if request.method == "POST" else 0):
            if self._fleet.num_ready:
                break
            await asyncio.sleep(LOOK_S)
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        headers.append(("Host", request.headers.get("host", "")))
        # It does not come from this machine, for all that the proxy can see.
        headers.append(("X-Forwarded-For", request.client.host if request.client else "unknown"))
        url = request.url.path + f"?{request.url.query}" * bool(request.url.query)
        answer = await self._session.request(
            request.method, self._url + url, data=await request.body(), headers=headers, allow_redirects=False
        )
        passed = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        return StreamingResponse(_body(answer), answer.status, passed)

    def _follow(self, urls: frozenset[str]) -> None:
        servers = self._fleet.servers
        for url in urls:
            if url not in servers:
                self._spawn(self._fleet.add(url, cold=self._began))
            elif servers[url].drained:
                self._fleet.resume(servers[url])
        for url in servers.keys() - urls:
            self._fleet.drain(servers[url])
            self._spawn(self._forget(servers[url]))

    async def _forget(self, server: FleetServer) -> None:
        """Removes a server from the fleet when its requests have ended."""
        while server.carried:
            await asyncio.sleep(LOOK_S)
        if server.drained and self._fleet.servers.get(server.url) is server:
            await self._fleet.remove(server.url)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _body(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for piece in answer.content.iter_any():
            yield piece


def _authorization(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def num_wanted(context: Any) -> tuple[int, dict[str, Any]]:
    """Returns how many servers are wanted: enough for their requests, and one more where all pools are nearly full.

    Called by Serve, which keeps to the bounds and delays of its `AutoscalingConfig`.
    """
    found = context.aggregated_metrics or {}
    requests, pools = sum(found.get("requests", {}).values()), found.get("pool", {}).values()
    wanted = math.ceil(requests / context.config.target_ongoing_requests)
    if pools and min(pools) > FULL_POOL:
        wanted = max(wanted, context.current_num_replicas + 1)
    return wanted, {}


def build(
    model: str,
    words: Sequence[str],
    settings: ProxySettings,
    router_settings: RouterSettings,
    replicas: tuple[int, int],
    resources: Mapping[str, Any] | None = None,
    host: str | None = None,
) -> Any:
    """Returns the application.

    Args:
      words: settings of the engine, and options of `ksana serve`.
      replicas: least and most servers; between them, as many as keep `max_requests_per_server` requests each.
      resources: of each server, as Ray's options; None for one CPU.
      host: on which servers listen; None takes each node's address.
    """
    key = settings.server_api_key
    if key is None and settings.api_keys:
        # The same for each version of the application, or old servers would refuse a new ingress.
        key = hashlib.sha256(f"servers of {settings.api_keys[0]}".encode()).hexdigest()
    least, most = replicas
    scaling: dict[str, Any] = {"num_replicas": least}
    if least < most:
        policy = config.AutoscalingPolicy(policy_function=f"{__name__}:{num_wanted.__name__}")
        target = settings.max_requests_per_server
        scaling = {
            "autoscaling_config": config.AutoscalingConfig(
                min_replicas=least, max_replicas=most, target_ongoing_requests=target, policy=policy
            )
        }
    servers = serve.deployment(
        Server,
        ray_actor_options=dict(resources or {}),
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s + 2 * STOP_S,
        max_constructor_retry_count=MOST_STARTS,
        request_router_config=config.RequestRouterConfig(request_router_class=ServerList),
        **scaling,
    ).bind(model, tuple(words), key, settings.shutdown_timeout_s, host)
    ingress = serve.deployment(
        Ingress,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2**20,  # the proxy has its own limits
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s + STOP_S,
    )
    own = dataclasses.replace(
        settings, host=LOCALHOST, port=0, server_api_key=key, tokenizer=settings.tokenizer or model
    )
    return ingress.bind(servers, own, router_settings)


def app(args: Mapping[str, Any]) -> Any:
    """Returns the application for `serve run` and Serve's configuration files.

    Args:
      args: model; replicas: a number, or "least-most"; resources: of each server, as Ray's options; settings of
        `ProxySettings` and `RouterSettings`; all others are settings of the engines.

    Raises:
      ConfigError: there is no model, or a setting is invalid.
    """
    read = {name: yaml.safe_load(value) if isinstance(value, str) else value for name, value in args.items()}
    if (model := read.pop("model", None)) is None:
        raise ConfigError("there is no model; give one, such as model=ksana-tiny")
    replicas, resources = read_replicas(str(read.pop("replicas", 1))), read.pop("resources", None)
    settings, router = (
        {k: read.pop(k) for k in _names(kind) & read.keys()} for kind in (ProxySettings, RouterSettings)
    )
    router["block_size"] = read["block_size"] = router.get("block_size", 16)
    words = [f"{name}={args.get(name, value)}" for name, value in read.items()]
    return build(str(model), words, ProxySettings(**settings), RouterSettings(**router), replicas, resources)


def _names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


async def run(application: Any, settings: ProxySettings) -> None:
    """Runs an application on the connected cluster until SIGTERM or Ctrl-C; requests under way then end first.

    Args:
      settings: with which it was built; Serve listens on their host and port.

    Raises:
      ConfigError: it does not start.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(http_options={"host": settings.host, "port": settings.port, "location": "HeadOnly"})
    serve.run_many([serve.RunTarget(application, name=NAME)], wait_for_applications_running=False)
    stopping, told = asyncio.Event(), False
    with handling(stopping.set):
        while not stopping.is_set():
            status = serve.status().applications[NAME]
            if status.status == "DEPLOY_FAILED":
                said = next((one.message for one in status.deployments.values() if one.message), status.message)
                last = said.strip().splitlines()[-1].removeprefix("RuntimeError: ")
                raise ConfigError(f"servers do not start: {last}")
            if status.status == "RUNNING" and not told:
                say(f"routing by {settings.policy} on http://{settings.host}:{settings.port}")
                told = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), LOOK_S)
        await asyncio.to_thread(serve.delete, NAME)
