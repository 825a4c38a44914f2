"""`ksana route --on ray`: a server as an actor of a cluster of this machine, killed and started again."""

import asyncio
import contextlib
import os
import signal
import sys

import aiohttp
import pytest

from ksana_jax.serve.router.proxy.spawning import free_port
from tests.serve.router.proxy.test_kill_soak import pid_of_port


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_server_in_a_cluster_serves_and_starts_again_when_it_was_killed():
    pytest.importorskip("ray", reason="the extra ray is not installed")

    async def main():
        port = free_port()
        command = [sys.executable, "-m", "ksana_jax", "route", "--spawn", "1", "ksana-tiny", "max_model_len=64"]
        options = ["--on", "ray", "--ray-address", "local", "--port", str(port), "--probe-interval", "0.5"]
        route = await asyncio.create_subprocess_exec(*command, *options, stderr=asyncio.subprocess.PIPE)
        lines = []

        async def read():
            async for line in route.stderr:
                lines.append(line.decode())

        reading = asyncio.create_task(read())
        url = f"http://127.0.0.1:{port}"
        try:
            async with aiohttp.ClientSession() as client:
                server = await ready(client, url, lines)
                await ask(client, url)
                os.kill(pid_of_port(server["id"].rpartition(":")[2]), signal.SIGKILL)
                await asyncio.sleep(2.0)
                await ready(client, url, lines)
                await ask(client, url)
            assert any("has ended (exit code -9" in line for line in lines), lines
        finally:
            with contextlib.suppress(ProcessLookupError):
                route.terminate()
            code = await asyncio.wait_for(route.wait(), 60)
            await reading
        assert code == 0, lines

    async def ask(client, url):
        async with client.post(url + "/v1/completions", json={"prompt": "Once", "max_tokens": 4}) as got:
            assert got.status == 200, await got.text()

    async def ready(client, url, lines):
        for _ in range(480):
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(url + "/servers") as got:
                    servers = (await got.json())["servers"]
                    if servers and servers[0]["state"] in ("ready", "warming"):
                        return servers[0]
            await asyncio.sleep(0.25)
        raise AssertionError(f"not ready within 120 s: {lines[-20:]}")

    asyncio.run(main())
