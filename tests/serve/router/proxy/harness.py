"""A proxy before fake servers, in one event loop; what must hold of its router is checked at the end."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from ksana_jax.serve.router import RouterSettings
from ksana_jax.serve.router.health import HealthSettings
from ksana_jax.serve.router.proxy.app import Proxy, running
from ksana_jax.serve.router.proxy.fleet import Fleet
from ksana_jax.serve.router.proxy.settings import ProxySettings
from tests.serve.router.invariants import check_fleet
from tests.serve.router.proxy.fake_server import FakeServer


@dataclasses.dataclass
class Scene:
    """A running proxy, its fake servers, and a client."""

    url: str
    proxy: Proxy
    fakes: list[FakeServer]
    client: aiohttp.ClientSession

    @property
    def fleet(self) -> Fleet:
        return self.proxy.fleet

    async def ask(self, prompt: Any = "hello", **fields: Any) -> tuple[int, Any]:
        """Sends a request for a completion; returns status and JSON."""
        body = {"model": "fake", "prompt": prompt, "max_tokens": 4} | fields
        async with self.client.post(f"{self.url}/v1/completions", json=body) as got:
            return got.status, await got.json()

    async def stream(self, prompt: Any = "hello", **fields: Any) -> tuple[int, str]:
        """Sends a request for a stream; returns status and the whole of it."""
        body = {"model": "fake", "prompt": prompt, "max_tokens": 4, "stream": True} | fields
        async with self.client.post(f"{self.url}/v1/completions", json=body) as got:
            return got.status, (await got.read()).decode()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url + path) as got:
            text = await got.text()
            return got.status, await got.json() if got.content_type == "application/json" else text


@contextlib.asynccontextmanager
async def scene(
    num_servers: int = 2,
    *,
    prompts: Any = None,
    router: RouterSettings | None = None,
    health: HealthSettings | None = None,
    key: str | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """Starts fakes and a proxy; probes come fast."""
    fakes = [FakeServer() for _ in range(num_servers)]
    urls = [await fake.start() for fake in fakes]
    health = health or HealthSettings(probe_every_s=0.05, max_missed=3, warm_s=0.0)
    probe = {"probe_s": health.probe_every_s, "probe_timeout_s": 0.1}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        async with Fleet(ProxySettings(port=0, **(probe | settings)), router, health) as fleet:
            for url in urls:
                await fleet.add(url)
            proxy = Proxy(fleet, prompts)
            async with running(proxy) as url, aiohttp.ClientSession(headers=headers) as client:
                yield Scene(url, proxy, fakes, client)
                check_fleet(fleet)
                assert not fleet.router.ledger.live and not any(s.carried for s in fleet.servers.values())
    finally:
        for fake in fakes:
            await fake.stop()
