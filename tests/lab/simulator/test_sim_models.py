"""Several models of a simulated server, of which one is awake: who waits for whom, and for how long."""

import dataclasses

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.engine.residents import TURN_S
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.simulator import fleet
from ksana_jax.lab.simulator.chains import Chains
from ksana_jax.lab.simulator.cost import AffineCost
from ksana_jax.lab.simulator.sim_models import SimModels
from ksana_jax.serve.router.router import Router
from ksana_jax.serve.router.settings import RouterSettings
from tests.lab.simulator.items import MODEL, config, drawn_items, item

COST = AffineCost(0.010, 0.001)


def serve(items, num_servers=1, **settings):
    """Serves requests on a fleet without a network; returns them in their order, and the servers."""
    made, engine = [], config(async_scheduling=False, enable_prefix_caching=True)

    def make(*given, **calls):
        made.append(SimModels(MODEL, engine, *given, COST, **settings, **calls))
        return made[-1]

    router = Router(range(num_servers), "round_robin", RouterSettings(engine.block_size, 1000))
    run = fleet.serve(items, make, router, Chains(engine.block_size), network_s=0)
    return [trip.served for trip in sorted(run.trips, key=lambda trip: trip.item.index)], made


def of(client: str, number: int, *given, **more):
    return dataclasses.replace(item(number, *given, **more), client=client)


def test_a_change_waits_for_the_requests_of_the_model_that_is_awake_and_takes_its_seconds():
    items = [of("a", 0, 0.0, 20, 4), of("b", 1, 0.001, 20, 4), of("a", 2, 0.002, 20, 4)]
    (first, other, later), [server] = serve(items, switch_s=0.5)
    alone = 0.030 + 3 * 0.011
    # The third joins the first after its first step: 20 more tokens with one of the first, and the rest is theirs.
    assert first.finished_s > alone and later.first_token_s < first.finished_s
    assert other.first_token_s == pytest.approx(max(first.finished_s, later.finished_s) + 0.5 + 0.030)
    assert server.num_switches == 1


def test_new_requests_wait_too_once_another_model_has_waited_for_its_turn():
    items = [of("a", number, 0.5 * number, 20, 60) for number in range(30)]
    items.insert(7, of("b", 30, 3.2, 20, 4))
    (*mine, other), [server] = serve(items, switch_s=0.5)
    assert TURN_S <= other.first_token_s - other.arrival_s < TURN_S + 0.5 + 1.0
    assert server.num_switches == 2
    waiting = [served for served in mine if other.arrival_s + TURN_S <= served.arrival_s < other.finished_s]
    assert waiting and all(served.first_token_s > other.finished_s + 0.5 for served in waiting)


def test_prefixes_of_a_model_are_gone_when_it_wakes_up_again():
    text = {"seed": 5}
    items = [
        *(of("a", number, float(number), 40, 4, **text) for number in range(2)),
        of("b", 2, 2.0, 40, 4, **text),
        *(of("a", number, float(number), 40, 4, **text) for number in (3, 4)),
    ]
    served, [server] = serve(items, switch_s=0.1)
    assert [one.num_cached_tokens for one in served] == [0, 32, 0, 0, 32]
    assert server.num_switches == 2


def test_no_request_is_lost_and_only_servers_of_several_models_change():
    """The fleet checks its laws; three servers in turn get one of three models each."""
    drawn = [dataclasses.replace(one, client="abc"[one.index % 3]) for one in drawn_items(200, rate=2.0)]
    means = {}
    for num_servers, switch_s in ((3, 1.0), (2, 0.0), (2, 1.0)):
        served, servers = serve(drawn, num_servers, switch_s=switch_s)
        assert all(one.finish_reason in ("stop", "length") for one in served)
        changes = sum(server.num_switches for server in servers)
        assert changes > 10 if num_servers == 2 else changes == 0
        means[num_servers, switch_s] = sum(one.finished_s - one.arrival_s for one in served) / len(served)
    assert means[2, 1.0] > means[2, 0.0] + 0.5 and means[2, 0.0] > means[3, 1.0]


def test_what_clients_ask_is_a_model_or_an_adapter():
    given = {"task": "simulate", "model": "llama-2-7b", "load_format": "dummy", "engine": {"num_blocks": 64}}
    for more in ({"settings.server": "request_level"}, {"engine.enable_lora": True}):
        with pytest.raises(ConfigError, match="clients that ask models need server 'engine' and no adapters"):
            plan(given | {"settings": {"switch_s": 1.0}, "variants": [{"name": "x", **more}]})
