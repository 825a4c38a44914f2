"""SIGTERM of `ksana route` under load: what was accepted ends whole, and at a second signal with an error event."""

import asyncio
import contextlib
import json
import signal
import sys

import aiohttp
import pytest

from tests.serve.router.proxy.fake_server import FakeServer
from tests.serve.router.proxy.test_proxy import events, until

NUM_CLIENTS, NUM_TOKENS = 16, 20


@contextlib.asynccontextmanager
async def routed(*fakes):
    """Starts `ksana route` before fake servers; yields its process, its URL and its lines."""
    servers = ",".join([await fake.start() for fake in fakes])
    command = [
        sys.executable,
        "-m",
        "ksana_jax",
        "route",
        "--servers",
        servers,
        "--port",
        "0",
        "--tokenizer",
        "ksana-tiny",
    ]
    route = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert route.stderr is not None
    line = (await asyncio.wait_for(route.stderr.readline(), 60)).decode()
    try:
        yield route, line.split(" on ")[1].split()[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            route.kill()
        await route.wait()
        for fake in fakes:
            await fake.stop()


async def ask_until_refused(url: str, ended: list[list], streams: bool) -> None:
    """Sends one request after the other until the proxy refuses one; collects the events of those that it accepted."""
    body = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "stream": streams}
    async with aiohttp.ClientSession() as client:
        while True:
            try:
                async with client.post(url + "/v1/completions", json=body) as got:
                    if got.status == 503:
                        assert (await got.json())["error"]["code"] == "draining"
                        return
                    assert got.status == 200
                    text = (await got.read()).decode()  # raises if the answer is cut
                    ended.append(events(text) if streams else [json.loads(text)])
            except aiohttp.ClientConnectorError:  # the proxy is gone
                return


async def test_sigterm_under_load_loses_nothing_that_was_accepted():
    fakes, ended = [FakeServer(0.02, 0.02), FakeServer(0.02, 0.02)], []
    async with routed(*fakes) as (route, url):
        load = [asyncio.create_task(ask_until_refused(url, ended, number % 2 == 0)) for number in range(NUM_CLIENTS)]
        await until(lambda: len(ended) > NUM_CLIENTS and all(fake.num_active > 2 for fake in fakes), 60)
        before = len(ended)
        route.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*load), 60)
        assert await asyncio.wait_for(route.wait(), 60) == 0
        assert len(ended) > before and not any(fake.num_aborted for fake in fakes)
        assert sum(len(fake.requests) for fake in fakes) == len(ended)
        streams = [got for got in ended if len(got) > 1]
        assert streams and all(len(got) == NUM_TOKENS + 1 and "error" not in got[-1] for got in streams)


async def test_a_second_signal_ends_streams_with_an_error_event():
    fake, ended = FakeServer(0.0, 1.0), []
    async with routed(fake) as (route, url):
        load = [asyncio.create_task(ask_until_refused(url, ended, True)) for _ in range(4)]
        await until(lambda: fake.num_active == 4, 60)
        route.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(route.wait(), 0.5)
        route.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(*load), 60)
        assert await asyncio.wait_for(route.wait(), 60) == 0
        assert [len(got) < NUM_TOKENS and "error" in got[-1] for got in ended] == [True] * 4
