"""Requests to a Ray Serve application whose servers scale from 1 to 4 and back, one of which is killed, all upgraded.

`test_ray_soak.py` runs it in a process of its own: python -m tests.serve.router.proxy.ray_scenario
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path

import aiohttp
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import RequestRouterConfig

from ksana_jax import LLM, SamplingParams
from ksana_jax.serve import on_ray_serve
from ksana_jax.serve.router import RouterSettings
from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.router.proxy.spawning import LOCALHOST, free_port

ENGINE = ("max_model_len=128", "block_size=8", "--no-warm-up")
PROMPTS = [f"def function_{i % 7}(argument_{i % 7}):\n    return {i}" for i in range(40)]
NUM_TOKENS, AT_ONCE, LEAST = 24, 6, 200


def expected() -> dict[str, str]:
    llm = LLM("ksana-tiny", max_model_len=128, block_size=8)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    return {prompt: output.outputs[0].text for prompt, output in zip(PROMPTS, outputs, strict=True)}


class Load:
    """Streams answers to clients until `stop`; counts those with every token, errors within streams, and the rest."""

    def __init__(self, url: str, texts: dict[str, str]):
        self.url, self.texts, self.stopping = url, texts, False
        self.num_whole, self.broken, self.wrong = 0, [], []
        self.prompts = itertools.cycle(PROMPTS)

    async def client(self, session: aiohttp.ClientSession) -> None:
        while not self.stopping:
            prompt = next(self.prompts)
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
            async with session.post(self.url + "/v1/completions", json=body) as got:
                text = await got.text()
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            if got.status == 200 and any("error" in event for event in events):
                self.broken.append(events[-1]["error"]["message"])
            elif got.status != 200 or "".join(e["choices"][0]["text"] for e in events) != self.texts[prompt]:
                self.wrong.append((got.status, text[:200]))
            else:
                self.num_whole += 1


def server_pids() -> set[int]:
    """Processes of `ksana serve` with this scenario's settings."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if {b"serve", *map(str.encode, ENGINE)} <= set(path.read_bytes().split(b"\0")):
                found.add(int(path.parent.name))
    return found


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0},
    request_router_config=RequestRouterConfig(
        request_router_class="ksana_jax.serve.router.ray_serve_router:PolicyRouter",
        request_router_kwargs={"model": "ksana-tiny", "block_size": 4},
    ),
)
class OfOthers:
    def __call__(self, body: dict) -> str:
        return serve.get_replica_context().replica_id.unique_id


async def places_of_prefixes() -> list[list[int]]:
    """Calls of each of six prefixes that each of two replicas of somebody else's deployment got."""
    handle = await asyncio.to_thread(serve.run, OfOthers.bind(), name="others", route_prefix="/others")
    seen = [Counter() for _ in range(6)]
    for number in range(60):
        body = {"prompt": f"{number % 6} system prompt of this number, a long one\n" * 3 + str(number)}
        seen[number % 6][await handle.remote(body)] += 1
    await asyncio.to_thread(serve.delete, "others")
    replicas = sorted(set().union(*seen))
    return [[counts[replica] for counts in seen] for replica in replicas]


async def main() -> dict:
    port = free_port()
    settings, router = ProxySettings(port=port), RouterSettings(block_size=8)

    async def deploy(count: int, *words: str) -> None:
        made = on_ray_serve.build("ksana-tiny", (*ENGINE, *words), settings, router, (count, count), host=LOCALHOST)
        await asyncio.to_thread(serve.run, made, name="ksana")

    serve.start(http_options={"host": LOCALHOST, "port": port, "location": "HeadOnly"})
    await deploy(1)
    load, seen = Load(f"http://{LOCALHOST}:{port}", expected()), {}
    async with aiohttp.ClientSession() as session:
        clients = [asyncio.create_task(load.client(session)) for _ in range(AT_ONCE)]
        await deploy(4)
        seen["scaled"] = load.num_whole
        victim = server_pids().pop()
        os.kill(victim, signal.SIGKILL)
        while len(server_pids() - {victim}) < 4:
            await asyncio.sleep(0.2)
        seen["killed"] = load.num_whole
        await deploy(4, "max_num_seqs=8")
        seen["upgraded"] = load.num_whole
        await deploy(1, "max_num_seqs=8")
        seen["back"] = load.num_whole
        while load.num_whole < LEAST:
            await asyncio.sleep(0.2)
        load.stopping = True
        await asyncio.gather(*clients)
    prefixes = await places_of_prefixes()
    return {"prefixes": prefixes, "whole": load.num_whole, "broken": load.broken, "wrong": load.wrong, **seen}


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_ip_address": LOCALHOST})
    cluster.add_node(num_cpus=2, node_ip_address=LOCALHOST)
    cluster.add_node(num_cpus=2, node_ip_address=LOCALHOST)
    ray.init(cluster.address, log_to_driver=False)
    print(json.dumps(asyncio.run(main())), flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
