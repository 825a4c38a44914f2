"""What must hold at any time in the router, its ledger, its index and the proxy's fleet; each raises AssertionError."""

import numpy as np

from ksana_jax.serve.router.events import DEVICE
from ksana_jax.serve.router.health import ServerState


def check_fleet(fleet):
    """The router is right, and its ledger has exactly the requests that the servers have."""
    check_router(fleet.router)
    carried = sum(len(server.carried) for server in fleet.servers.values())
    live = len(fleet.router.ledger.live)
    assert live == carried, f"{live} requests, {carried} exchanges"
    alive = {s.url for s in fleet.servers.values() if s.health.state(fleet.clock()) is not ServerState.DEAD}
    assert set(fleet.router.servers) == alive, "the router has dead servers, or lacks some"


def check_router(router):
    """Sums and bits are right, and a removed server has none."""
    check_ledger(router.ledger)
    check_index(router.index)
    if (table := getattr(router.policy, "table", None)) is not None:
        check_table(table)
    for number, server in enumerate(router._ids):
        if server is None:
            assert not router.index.num_blocks[number] and not router.ledger.requests[number]
        else:
            assert router._numbers[server] == number
    assert len(router._numbers) == len(router._ids) - router._ids.count(None)


def check_ledger(ledger):
    """Every sum is that of the unfinished requests."""
    sums = {name: np.zeros(len(ledger._waiting)) for name in ("work", "rows", "requests", "held")}
    for name, live in ledger.live.items():
        assert name == live.request.request_id
        assert live.decoding == (name not in ledger._waiting[live.server])
        sums["work"][live.server] += 0 if live.decoding else live.work
        sums["rows"][live.server] += live.decoding
        sums["requests"][live.server] += 1
        sums["held"][live.server] += live.held
    for name, expected in sums.items():
        assert (getattr(ledger, name) == expected).all(), f"{name}: {getattr(ledger, name)}, requests have {expected}"
    assert sum(map(len, ledger._waiting)) == sum(not live.decoding for live in ledger.live.values())
    for server, waiting in enumerate(ledger._waiting):
        assert ledger.front[server] == (next(iter(waiting.values())).work if waiting else 0)


def check_index(index):
    """The bits match the servers' blocks, and no server has more expected blocks than fit."""
    bits, slow, states, recurrent = {}, {}, {}, 0
    for server, cache in enumerate(index._caches):
        assert not cache.expected.keys() & cache.stored.keys(), "a block is both expected and stored"
        assert all(cache.stored.values()), "a stored block is on no medium"
        assert index.num_blocks[server] == cache.num_blocks
        assert not cache.expected or cache.num_blocks <= index.capacity[server]
        assert list(cache.expected.values()) == sorted(cache.expected.values()), "not in order of time"
        for found in (*cache.expected, *cache.stored):
            bits[found] = bits.get(found, 0) | 1 << server
        for found in (found for found, media in cache.stored.items() if DEVICE not in media):
            slow[found] = slow.get(found, 0) | 1 << server
        assert all(cache.states.values()), "a state is on no medium"
        for found in cache.states:
            states[found] = states.get(found, 0) | 1 << server
        recurrent |= (cache.state_group is not None) << server
    assert slow == index._slow
    assert bits == index._holders
    assert states == index._states and recurrent == index._recurrent


def check_table(table):
    """Sums and caps of the table of prefixes are right."""
    counts, tokens = np.zeros_like(table.num_prefixes), np.zeros_like(table.num_tokens)
    lengths = {}
    for key, prefix in table.prefixes.items():
        assert prefix.key == key and len(set(prefix.members)) == len(prefix.members)
        assert prefix.given <= set(prefix.members)
        assert prefix.servers == sum(1 << server for server in prefix.members)
        lengths[prefix.num_blocks] = lengths.get(prefix.num_blocks, 0) + 1
        counts[prefix.members] += 1
        tokens[prefix.members] += prefix.num_tokens
    assert lengths == table._lengths
    assert (counts == table.num_prefixes).all() and (tokens == table.num_tokens).all()
    assert (counts <= table.settings.max_prefixes_per_server).all()
