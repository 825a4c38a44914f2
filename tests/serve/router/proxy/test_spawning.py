"""Servers that the proxy starts: what they write, restarts, kills under load, and settings that cannot work."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from ksana_jax.serve.router.health import HealthSettings
from ksana_jax.serve.router.proxy import launching
from ksana_jax.serve.router.proxy.app import Proxy, running
from ksana_jax.serve.router.proxy.fleet import Fleet
from ksana_jax.serve.router.proxy.launching import Keeper
from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.router.proxy.spawning import LocalLauncher
from tests.serve.router.invariants import check_fleet
from tests.serve.router.proxy.test_proxy import events, until

# jax warns of forks; the proxy has not imported it (tests/test_imports.py), a process of tests may have.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

FAKE = [sys.executable, str(Path(__file__).parent / "fake_server.py")]
HEALTH = HealthSettings(probe_every_s=0.1, warm_s=0.0)


@contextlib.asynccontextmanager
async def spawned(command, count, lines, **settings):
    launcher = LocalLauncher(command, 5.0, lines.append)
    async with Fleet(ProxySettings(port=0, probe_s=0.1, **settings), None, HEALTH) as fleet:
        proxy = Proxy(fleet)
        async with running(proxy) as url, aiohttp.ClientSession() as client, Keeper(fleet, launcher, count) as keeper:
            proxy.keeper = keeper
            yield launcher, fleet, keeper, url, client
            check_fleet(fleet)
    assert all(process.returncode is not None for process in launcher.processes.values())


async def test_a_killed_server_under_load_costs_only_the_streams_that_it_had(monkeypatch):
    monkeypatch.setattr(launching, "FIRST_WAIT_S", 0.1)
    lines = []
    command = [*FAKE, "--token-s", "0.01", "--ttft-s", "0.05"]
    async with spawned(command, 4, lines, policy="round_robin") as (launcher, fleet, _, url, client):
        await until(lambda: fleet.num_ready == 4, 10)
        ended, stop = [], False

        async def one_after_the_other():
            while not stop:
                body = {"prompt": [1, 2], "max_tokens": 20, "stream": True}
                async with client.post(url + "/v1/completions", json=body) as got:
                    assert got.status == 200
                    ended.append(events((await got.read()).decode()))

        load = [asyncio.create_task(one_after_the_other()) for _ in range(16)]
        await asyncio.sleep(0.6)
        victim = fleet.servers[f"http://127.0.0.1:{launcher._ports[2]}"]
        number, live = fleet.router._numbers[victim.url], fleet.router.ledger.live
        await until(lambda: sum(r.server == number and r.num_output > 2 for r in live.values()) >= 2)
        at_the_victim = len(victim.carried)
        first = launcher.processes[2].pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: victim.url not in fleet.router.servers)
        await until(lambda: fleet.num_ready == 4, 10)
        assert launcher.processes[2].pid != first
        await asyncio.sleep(0.3)
        stop = True
        await asyncio.gather(*load)
        broken = [got for got in ended if "error" in got[-1]]
        assert len(ended) > 40 and all(len(got) == 21 for got in ended if got not in broken)
        assert 0 < len(broken) == fleet.num_broken <= at_the_victim
        assert fleet.router.counts.choices[victim.url] > 4


async def test_lines_of_servers_are_shown_with_their_number_and_a_restart_drains_first(monkeypatch):
    monkeypatch.setattr(launching, "FIRST_WAIT_S", 0.1)
    lines = []
    async with spawned([*FAKE, "--token-s", "0.02"], 2, lines) as (launcher, fleet, _, url, client):
        await until(lambda: fleet.num_ready == 2, 10)
        assert sorted(line[:10] for line in lines) == ["[server 0]", "[server 1]"]
        body = {"prompt": [1, 2], "max_tokens": 20, "stream": True}
        async with client.post(url + "/v1/completions", json=body) as got:
            await got.content.readany()
            busy = next(server for server in fleet.servers.values() if server.carried)
            index = next(i for i, port in launcher._ports.items() if busy.url.endswith(f":{port}"))
            before = launcher.processes[index].pid
            async with client.post(f"{url}/servers/{busy.name}/restart", json={}) as answer:
                assert (await answer.json())["state"] == "draining"
            assert b"[DONE]" in await got.read() and not fleet.num_broken
        await until(lambda: launcher.processes[index].pid != before and fleet.num_ready == 2, 10)


def test_a_server_with_invalid_settings_ends_the_command():
    lines = []

    async def main():
        command = [sys.executable, "-c", "import sys; print('ksana: error: no such model'); sys.exit(2)"]
        async with spawned(command, 2, lines) as (_, _, keeper, _, _):
            with pytest.raises(ValueError, match=r"^servers do not start: no such model$"):
                await asyncio.wait_for(keeper.failed, 10)

    asyncio.run(main())
    assert not lines  # the error is told once, for all servers


def test_an_error_line_that_is_not_a_servers_last_is_shown():
    lines = []

    async def main():
        code = "print('ksana: error: one'); print('two'); 1 / 0"
        launcher = LocalLauncher([sys.executable, "-u", "-c", code], 5.0, lines.append)
        await launcher.start(0)
        return await launcher.ended(0)

    assert asyncio.run(main()).why == "exit code 1: ZeroDivisionError: division by zero"
    assert lines[:2] == ["[server 0] ksana: error: one", "[server 0] two"]


async def test_only_servers_that_were_started_here_can_be_restarted():
    async with spawned(FAKE, 1, []) as (_, fleet, _, url, client):
        await fleet.add("http://127.0.0.1:9")
        async with client.post(f"{url}/servers/127.0.0.1:9/restart", json={}) as got:
            assert got.status == 400 and "not started here" in (await got.json())["error"]["message"]
