"""Chats over the same two servers, by four ways: `python -m tests.serve.router.proxy.measure_ray [--repeats 3]`.

The ways: the server of each chat itself, `ksana route`, our ingress of Ray Serve, and a Serve application of the usual
kind, whose calls Ray's PrefixCacheAffinityRouter routes (it needs pyarrow). Prints the time to the first token and the
part of prompts that servers had cached. All share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import aiohttp
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from starlette.requests import Request
from starlette.responses import StreamingResponse

from ksana_jax.serve import on_ray_serve
from ksana_jax.serve.router import RouterSettings
from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.router.proxy.spawning import LOCALHOST, free_port
from tests.serve.router.proxy.measure import percentile

BLOCK, CHATS, TURNS, AT_ONCE = 8, 25, 8, 4
ENGINE = ("max_model_len=1024", f"block_size={BLOCK}", "max_num_seqs=8", "num_blocks=1024")
JSON = {"Content-Type": "application/json"}
WORDS = "red green blue one two three four five tree house river stone bird cloud fire".split()
RAYS_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"


@ray.remote
class Places:
    """Gives each replica of `Passing` another server."""

    def __init__(self, urls: list[str]):
        self.urls = urls

    def take(self) -> str:
        return self.urls.pop()


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=100,
    ray_actor_options={"num_cpus": 0},
    request_router_config=RequestRouterConfig(request_router_class=RAYS_ROUTER),
)
class Passing:
    """A replica that streams the answers of one server."""

    async def __init__(self, places):
        self.url, self.session = await places.take.remote(), aiohttp.ClientSession()

    async def __call__(self, asked: SimpleNamespace):
        async with self.session.post(self.url + "/v1/completions", data=asked.body, headers=JSON) as got:
            async for piece in got.content.iter_any():
                yield piece


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})
class Usual:
    """An ingress that calls the replicas of `Passing` by Serve's handle."""

    def __init__(self, servers):
        self.servers = servers.options(stream=True)

    async def __call__(self, request: Request) -> StreamingResponse:
        body = await request.body()
        asked = SimpleNamespace(prompt=json.loads(body)["prompt"], body=body)
        return StreamingResponse(self.servers.remote(asked))


class Load:
    """Chats of TURNS turns, AT_ONCE at a time: times to the first token, tokens of prompts, those that were cached."""

    def __init__(self, urls: list[str], seed: str):
        self.urls, self.seed, self.ttft_s = urls, seed, []
        self.num_tokens = self.num_cached = 0

    async def run(self) -> None:
        chats = iter(range(CHATS))
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._client(session, chats) for _ in range(AT_ONCE)))

    async def _client(self, session, chats) -> None:
        for chat in chats:
            draw, text = random.Random(f"{self.seed} {chat}"), ""
            for _ in range(TURNS):
                text += " ".join(draw.choices(WORDS, k=24)) + ". "
                text += await self._ask(session, self.urls[chat % len(self.urls)], text)

    async def _ask(self, session, url: str, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        began, first, lines = time.perf_counter(), None, []
        async with session.post(url + "/v1/completions", json=body) as got:
            assert got.status == 200, await got.text()
            async for line in got.content:
                first = first or time.perf_counter()
                lines.append(line)
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        usage = next(event["usage"] for event in events if event.get("usage"))
        self.ttft_s.append(first - began)
        self.num_tokens += usage["prompt_tokens"]
        self.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        return "".join(choice["text"] for event in events for choice in event["choices"])


async def ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            try:
                async with session.get(url + "/ready") as got:
                    if got.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"{url} is not ready")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.serve.router.proxy.measure_ray")
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    settings = ProxySettings(host=LOCALHOST, port=free_port(), tokenizer="ksana-tiny")
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    serve.start(http_options={"host": LOCALHOST, "port": settings.port})
    ours = on_ray_serve.build(
        "ksana-tiny", ENGINE, settings, RouterSettings(block_size=BLOCK), (2, 2), {"num_cpus": 1}, LOCALHOST
    )
    serve.run(ours, name="ours", route_prefix="/")
    servers, urls = serve.get_deployment_handle("Server", "ours"), set()
    while len(urls) < 2:
        urls.add(servers.address.remote().result())
    serve.run(Usual.bind(Passing.bind(Places.remote(sorted(urls)))), name="usual", route_prefix="/usual")
    port = free_port()
    command = [sys.executable, "-m", "ksana_jax", "route", "--servers", ",".join(sorted(urls)), "--tokenizer"]
    route = subprocess.Popen([*command, "ksana-tiny", "--block-size", str(BLOCK), "--port", str(port)])
    serving = f"http://{LOCALHOST}:{settings.port}"
    ways = {
        "the servers": sorted(urls),
        "ksana route": [f"http://{LOCALHOST}:{port}"],
        "our ingress of Ray Serve": [serving],
        "Ray's prefix router": [f"{serving}/usual"],
    }
    try:
        for way in ("the servers", "ksana route", "our ingress of Ray Serve"):
            for url in ways[way]:
                asyncio.run(ready(url))
        loads: dict[str, list[Load]] = {way: [] for way in ways}
        for repeat in range(-1, repeats):  # the first one warms up
            for way, addresses in ways.items():
                load = Load(addresses, f"{repeat} {way}")
                asyncio.run(load.run())
                if repeat >= 0:
                    loads[way].append(load)
    finally:
        route.terminate()
        route.wait()
        serve.shutdown()
        ray.shutdown()
    print(
        f"{'':26}{'TTFT, ms: p50':>14}{'p90':>8}{'p99':>8}{'cached':>9}   of {CHATS * TURNS} requests, {repeats} times"
    )
    for way, done in loads.items():
        times = [seconds * 1e3 for load in done for seconds in load.ttft_s]
        p50, p90, p99 = (percentile(times, share) for share in (0.5, 0.9, 0.99))
        cached = sum(load.num_cached for load in done) / sum(load.num_tokens for load in done)
        print(f"{way:26}{p50:14.1f}{p90:8.1f}{p99:8.1f}{cached:9.1%}")


if __name__ == "__main__":
    main()
