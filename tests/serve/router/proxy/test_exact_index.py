"""The router's exact index is what the engines cache: block hashes, events over HTTP, reconnecting, refusals."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import types

import aiohttp
import numpy as np
import pytest

from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.kv.prefix_index import Scope
from ksana_jax.kv.tier import DEVICE, HOST
from ksana_jax.serve.router import Router, RouterSettings, hashes_of
from ksana_jax.serve.router.proxy.app import Proxy, running
from ksana_jax.serve.router.proxy.fleet import Fleet
from ksana_jax.serve.router.proxy.following import EventFollower, read_event
from ksana_jax.serve.router.proxy.models import SameModel
from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.server.kv_events import KEPT, MEDIA, BlockEvent, KVEventLog
from ksana_jax.serve.server.sse import DONE, PING
from tests.engine import small
from tests.engine import test_lora as lora
from tests.fakes import make_engine
from tests.golden.cases import golden_case
from tests.serve.router.invariants import check_fleet, check_index
from tests.serve.router.proxy.test_proxy import until
from tests.serve.server.serving import make_llm, serving

SCOPE = Scope("a model")


def cached(served) -> dict[bytes, set[str]]:
    """Keys of the blocks that an engine caches, with their media."""
    memory, found = served.llm.engine.memory, {}
    for level, tier in ((DEVICE, memory.device), (HOST, memory.host)):
        for node in tier.node_of.values() if tier is not None else ():
            found.setdefault(node.key, set()).add(MEDIA[level])
    return found


@contextlib.asynccontextmanager
async def proxy_before(*servers, block_size=4, **settings):
    router = RouterSettings(block_size=block_size)
    async with Fleet(ProxySettings(port=0, index="exact", probe_s=0.05, **settings), router) as fleet:
        proxy = Proxy(fleet)
        follower = EventFollower(fleet, proxy.reader, proxy.server_headers)
        for served in servers:
            await fleet.add(f"http://127.0.0.1:{served.port}")
        async with running(proxy) as url, aiohttp.ClientSession() as client:
            yield fleet, follower, url, client
            check_fleet(fleet)


def known(fleet, served) -> dict[bytes, set[str]]:
    """Blocks that the router knows by events."""
    router = fleet.router
    return router.index._caches[router.servers.index(f"http://127.0.0.1:{served.port}")].stored


@pytest.mark.parametrize("host_slots", [0, 12])
async def test_the_index_is_what_the_engines_cache_after_many_requests(host_slots):
    shape = {"num_blocks": 40, "host_slots": host_slots, "scope": SCOPE}
    keys = {"api_keys": ("inner",)}
    with serving(make_llm(**shape), **keys) as one, serving(make_llm(**shape), **keys) as two:
        settings = {"api_keys": ("k1", "k2"), "server_api_key": "inner", "policy": "round_robin"}
        async with proxy_before(one, two, **settings) as (fleet, follower, url, client):
            rng = np.random.default_rng(1)
            texts = [rng.integers(0, 20, 40).tolist() for _ in range(6)]

            async def ask(number):
                prompt = texts[number % 6][: 12 + number % 29]
                headers = {"Authorization": f"Bearer k{number % 2 + 1}"}
                body = {"prompt": prompt, "max_tokens": 3}
                async with client.post(url + "/v1/completions", json=body, headers=headers) as got:
                    assert got.status == 200
                    return (await got.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

            for start in range(0, 60, 6):
                await asyncio.gather(*(ask(start + n) for n in range(6)))
            await until(lambda: known(fleet, one) == cached(one) and known(fleet, two) == cached(two))
            assert len(cached(one)) > 8 and follower.num_batches > 4
            assert sum(served.llm.engine.memory.counters.replaced for served in (one, two)) > 0
            # What the router expects of a prompt (none of these ends with a block) is what the server then finds.
            before = fleet.router.counts.expected_tokens
            found = [await ask(number) for number in (25, 26, 27, 30) for _ in range(3)]
            assert fleet.router.counts.expected_tokens - before == sum(found) > 0


def test_a_router_that_reconnects_gets_all_again():
    async def main():
        with serving(make_llm(scope=SCOPE)) as one:
            async with proxy_before(one) as (fleet, follower, url, client):
                server = fleet.servers[f"http://127.0.0.1:{one.port}"]

                async def ask(first):
                    body = {"prompt": [first] * 16, "max_tokens": 2}
                    async with client.post(url + "/v1/completions", json=body) as got:
                        assert got.status == 200

                await until(lambda: follower.num_batches)
                await ask(1)
                await until(lambda: known(fleet, one) == cached(one) != {})
                fleet.died(server, "the network failed")
                assert known_of_none(fleet)
                server.look.set()
                await until(lambda: fleet.router.servers)
                await ask(2)
                await until(lambda: known(fleet, one) == cached(one))
                assert len(cached(one)) > 6

    def known_of_none(fleet):
        return not fleet.router.servers and not len(fleet.router.index)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("engine", "block_size", "why"),
    [
        ({"caching": False}, 4, "prefix cache is off"),
        ({"scope": Scope("m", "a window", full_until=8)}, 4, "hides parts of a text"),
        ({}, 16, "its block_size is 4, the router's is 16"),
    ],
)
def test_servers_whose_events_do_not_fit_are_estimated_with_a_warning(engine, block_size, why, caplog):
    async def main():
        with serving(make_llm(**engine)) as one:
            async with proxy_before(one, block_size=block_size) as (fleet, _, url, client):
                await until(lambda: why in caplog.text)
                async with client.post(url + "/v1/completions", json={"prompt": [1] * 20, "max_tokens": 2}) as got:
                    assert got.status == 200
                assert len(fleet.router.index) == 20 // block_size

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


def test_events_need_the_key_and_end_when_the_server_does():
    with serving(api_keys=("k",)) as served:
        assert served.ask("GET", "/kv_events").status == 401
        got = []

        def read():
            got.append(served.ask("GET", "/kv_events", authorization="Bearer k").body)

        reader = threading.Thread(target=read)
        reader.start()
        while not hasattr(served.running.app.state, "kv_events"):
            pass
        assert served.stop() == 0
        reader.join(10)
        assert b"event: cache" in got[0]


def replayed(text: str, router: Router) -> None:
    """Hands a batch of a stream to a router."""
    router.events("s", map(read_event, json.loads(text.removeprefix("data: "))["events"]))


async def test_a_reader_gets_all_and_then_the_changes_and_one_that_is_too_late_all_again():
    log = KVEventLog(make_engine(caching=True))
    keys = [number.to_bytes(4, "big") for number in range(KEPT + 50)]
    for number, key in enumerate(keys[:10]):
        log.add([BlockEvent(DEVICE, key, keys[number - 1] if number else None, True)])
    stream, router = log.stream(lambda: False, 15.0), Router(["s"])
    assert (await anext(stream)).startswith("event: cache")
    first = await anext(stream)
    assert first.startswith('data: {"events":[{"type":"AllBlocksCleared"},') and first.count("BlockStored") == 1
    replayed(first, router)
    assert set(router.index._caches[0].stored) == set(keys[:10])
    log.add([BlockEvent(DEVICE, keys[10], None, True)])
    replayed(await anext(stream), router)
    assert set(router.index._caches[0].stored) == set(keys[:11])
    for key in keys[11:]:
        log.add([BlockEvent(DEVICE, key, None, True), BlockEvent(DEVICE, key, None, False)])
    log.add([BlockEvent(DEVICE, keys[11], None, True)])
    late = await anext(stream)
    assert late.startswith('data: {"events":[{"type":"AllBlocksCleared"},')
    replayed(late, router)
    # It was told everything when 10,000 batches waited, and what came later follows.
    while log._readers[0].qsize():
        replayed(await anext(stream), router)
        check_index(router.index)
    assert set(router.index._caches[0].stored) == set(keys[:12])
    await stream.aclose()
    assert not log._readers


async def test_a_reader_is_sent_comments_in_silence_and_the_end_when_the_server_ends():
    log, ended = KVEventLog(make_engine(caching=True)), []
    stream = log.stream(lambda: bool(ended), 0.01)
    found = [await anext(stream) for _ in range(4)]
    assert found[2:] == [PING, PING]
    log.add([BlockEvent(DEVICE, b"a", None, True)])
    assert "BlockStored" in await anext(stream)
    ended.append(True)
    assert [text async for text in stream] == [DONE]


def test_a_reader_that_leaves_ends_its_stream(monkeypatch):
    closed = threading.Event()

    async def endless(*_):
        try:
            while True:
                yield PING
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    monkeypatch.setattr(KVEventLog, "stream", endless)
    with serving() as served, socket.create_connection(("127.0.0.1", served.port)) as reader:
        reader.sendall(b"GET /kv_events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in reader.recv(64)
        reader.close()
        assert closed.wait(10)


def cached_states(memory) -> set[bytes]:
    def text(node):
        return text(node.parent) + node.tokens if node.depth >= 0 else b""

    texts = [np.frombuffer(text(node), np.int32) for node in memory.states.node_of.values()]
    return {hashes_of(ids, memory.block_size, "", memory.index.scope.model)[-1] for ids in texts}


async def test_a_server_with_recurrent_layers_tells_blocks_and_states():
    few = {"num_blocks": 30, "block_size": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "max_num_seqs": 2}
    few |= {"enable_prefix_caching": True, "state_snapshots": {"method": "every", "blocks": 2, "num_slots": 6}}
    llm = small.make_llm(folder=golden_case("kimi_linear-delta-latent-experts").model_dir, **few)
    with serving(AsyncLLM.around(llm)) as one:
        memory, dice = one.llm.engine.memory, np.random.default_rng(1)
        async with proxy_before(one) as (fleet, follower, url, client):
            states, found = fleet.router.index._states, []
            await until(lambda: follower.num_batches)
            for number in range(24):
                await until(lambda: known(fleet, one) == cached(one) and states.keys() == cached_states(memory))
                before = fleet.router.counts.expected_tokens
                body = {"prompt": [2 + number % 3] * int(dice.integers(9, 40)), "max_tokens": 2}
                async with client.post(url + "/v1/completions", json=body) as got:
                    found.append((await got.json())["usage"]["prompt_tokens_details"]["cached_tokens"])
                assert fleet.router.counts.expected_tokens - before == found[-1]
            assert max(found) >= 16 and memory.counters.replaced_states > 10
    assert KVEventLog(llm.engine)._kinds == ("mla_attention", "mamba")


async def test_prefixes_of_an_adapter_are_expected_where_requests_with_it_went():
    def served():
        folder = lora.GOLDEN / lora.BASE
        few = {"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
        llm = small.make_llm(folder=folder, enable_lora=True, max_loras=2, enable_prefix_caching=True, **few)
        adapters = tuple(map(lora.adapter, ("plain", "all")))
        for adapter in adapters:
            llm.engine.factory.adapter_of(adapter)
        return serving(AsyncLLM.around(llm), lora_modules=adapters, served_model_names=("base",))

    with served() as one, served() as two:
        async with proxy_before(one, two) as (fleet, follower, url, client):
            await until(lambda: follower.num_batches > 1)
            proxy = types.SimpleNamespace(fleet=fleet, reader=follower._reader, server_headers={})
            await SameModel(proxy).check()
            assert sorted(follower._reader.adapters) == ["all", "plain"]

            async def ask(model):
                body = {"model": model, "prompt": list(range(5, 27)), "max_tokens": 2}
                async with client.post(url + "/v1/completions", json=body) as got:
                    assert got.status == 200
                    return (await got.json())["usage"]["prompt_tokens_details"]["cached_tokens"]

            for expected in (0, 20):
                for model in ("base", "plain", "all"):
                    before = fleet.router.counts.expected_tokens
                    assert await ask(model) == expected
                    assert fleet.router.counts.expected_tokens - before == expected
                    await until(lambda: known(fleet, one) == cached(one) and known(fleet, two) == cached(two))
