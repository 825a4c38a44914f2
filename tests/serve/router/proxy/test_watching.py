"""Servers' own figures of their load: compared with the ledger and shown, and without a say in choices."""

import pytest

from ksana_jax.serve.router import RoutedRequest
from ksana_jax.serve.router.proxy.fleet import Fleet
from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.router.proxy.watching import read_figures
from tests.serve.router.proxy.harness import scene
from tests.serve.router.proxy.test_proxy import until
from tests.serve.server.serving import make_llm, serving

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} %d.0
vllm:num_requests_waiting{model_name="m"} %d.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
"""


@pytest.mark.parametrize(
    ("said", "ledger", "error"),
    [((3, 2), (5, 5), 0), ((3, 2), (2, 2), 3), ((0, 1), (4, 3), -2), ((4, 0), (3, 5), 0), ((6, 0), (3, 5), 1)],
)
def test_requests_that_begin_or_end_meanwhile_are_no_error(said, ledger, error):
    found = read_figures(METRICS % said, ledger, 7.0)
    assert found is not None
    assert (found.running, found.waiting, found.kv_usage, found.ledger_error, found.at_s) == (*said, 0.25, error, 7.0)


def test_engines_of_one_server_are_added_and_other_metrics_are_none():
    two = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 3.0\n'
    found = read_figures(two, (5, 5), 0.0)
    assert found is not None and found.running == 5
    assert read_figures("vllm:num_requests_running x\n", (0, 0), 0.0) is None
    assert read_figures("process_cpu_seconds_total 1.0\n", (0, 0), 0.0) is None


async def test_what_others_send_is_the_error_of_the_ledger_and_decides_nothing():
    async with scene(3, policy="least_work", watch_s=0.02) as s:
        s.fakes[0].metrics, s.fakes[1].metrics = METRICS % (40, 2), METRICS % (0, 0)
        servers = [s.fleet.servers[fake.url] for fake in s.fakes]
        await until(lambda: servers[0].own is not None and servers[1].own is not None)
        _, listed = await s.get("/servers")
        own = [server["own"] for server in listed["servers"]]
        assert [own[0][key] for key in ("running", "waiting", "kv_usage", "ledger_error")] == [40, 2, 0.25, 42]
        assert own[1]["ledger_error"] == 0 <= own[1]["age_s"] and own[2] is None
        _, text = await s.get("/metrics")
        assert f'router:ledger_error{{server="{servers[0].name}"}} 42.0' in text
        assert f'router:server_requests{{server="{servers[0].name}",state="waiting"}} 2.0' in text
        assert f'router:server_kv_usage{{server="{servers[1].name}"}} 0.25' in text
        assert f'router:ledger_error{{server="{servers[2].name}"}}' not in text
        # The busy server is chosen as often as the others.
        for _ in range(60):
            await s.ask()
        assert min(len(fake.requests) for fake in s.fakes) > 8
        s.fleet.died(servers[0], "gone")
        assert servers[0].own is None


async def test_a_real_server_agrees_with_the_ledger():
    with serving(make_llm(), api_keys=("k",)) as one:
        settings = ProxySettings(port=0, probe_s=0.05, watch_s=0.01, server_api_key="k")
        async with Fleet(settings) as fleet:
            server = await fleet.add(f"http://127.0.0.1:{one.port}")
            await until(lambda: server.own is not None and server.own.ledger_error == 0)
            fleet.choose(RoutedRequest("1", 10), ())  # which never reaches it
            await until(lambda: server.own is not None and server.own.ledger_error == -1)
            fleet.router.finished("1", fleet.clock())
