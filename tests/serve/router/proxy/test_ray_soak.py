"""`ksana route --spawn`: servers as replicas of Ray Serve, which scale, are killed, and are upgraded."""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys

import aiohttp
import pytest

from ksana_jax.serve.router.proxy.spawning import free_port
from tests.lab.runs.test_on_ray import RAY


@pytest.mark.soak
@pytest.mark.xdist_group("servers")  # one at a time: each starts several
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_the_command_serves_until_it_is_told_to_end():
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")

    async def main():
        port = free_port()
        command = [sys.executable, "-m", "ksana_jax", "route", "--spawn", "1", "ksana-tiny", "max_model_len=64"]
        options = ["--ray-address", "local", "--port", str(port), "--probe-interval", "0.5"]
        route = await asyncio.create_subprocess_exec(*command, *options, stderr=asyncio.subprocess.PIPE)
        lines = []

        async def read():
            async for line in route.stderr:
                lines.append(line.decode())

        reading = asyncio.create_task(read())
        url = f"http://127.0.0.1:{port}"
        try:
            async with aiohttp.ClientSession() as client:
                await ready(client, url, lines)
                await ask(client, url)
            assert lines == [f"ksana: routing by min_ttft on {url}\n"]
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
                async with client.get(url + "/ready") as got:
                    if got.status == 200 and lines:
                        return
            await asyncio.sleep(0.25)
        raise AssertionError(f"not ready within 120 s: {lines[-20:]}")

    asyncio.run(main())


@pytest.mark.soak
@pytest.mark.xdist_group("servers")  # one at a time: each starts several
@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_requests_end_while_servers_scale_die_and_are_upgraded():
    pytest.importorskip("ray.serve", reason="the extra ray is not installed")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.serve.router.proxy.ray_scenario"],
        env={**os.environ, **RAY, "RAY_AUTH_TOKEN": secrets.token_hex(32)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-8000:]
    found = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    assert found["wrong"] == [] and found["whole"] >= 200
    # Of the six clients, those whose answer had begun on the server that was killed.
    assert len(found["broken"]) <= 6 and all("after a part of the answer" in text for text in found["broken"])
    first, second = found["prefixes"]  # each prefix has all of its ten calls on one of them
    assert {*zip(first, second, strict=True)} == {(10, 0), (0, 10)}
