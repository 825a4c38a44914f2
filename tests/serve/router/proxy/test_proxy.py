"""Forwarding by the proxy, and its handling of failed servers: docs/use/proxy.md."""

import asyncio
import json

import aiohttp
import pytest

from ksana_jax.serve.router.health import HealthSettings
from tests.serve.router.proxy.harness import scene


def events(text: str) -> list:
    """The JSON of the events before [DONE], which must be the last one."""
    parts = text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""], text[-200:]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2] if not part.startswith(":")]


async def until(condition, seconds: float = 3.0):
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {seconds} s")


async def test_body_and_answer_pass_byte_for_byte():
    async with scene(1) as s:
        body = b'{"model": "fake",\n  "prompt": [1, 2, 3], "max_tokens":2 , "\\u006euser": null}'
        async with s.client.post(s.url + "/v1/completions", data=body, headers={"X-Request-Id": "mine"}) as got:
            assert got.status == 200 and got.headers["X-Request-Id"] == "mine"
            assert (await got.json())["usage"]["completion_tokens"] == 2
        path, head, sent = s.fakes[0].requests[0]
        assert (path, sent) == ("/v1/completions", body)
        assert b"X-Request-Id: mine" in head


async def test_a_stream_passes_and_feeds_the_ledger():
    async with scene(1) as s:
        s.fakes[0].token_s, s.fakes[0].cached_tokens = 0.02, 3
        task = asyncio.create_task(s.stream(max_tokens=10))
        ledger = s.fleet.router.ledger
        await until(lambda: any(live.decoding and live.num_output >= 2 for live in ledger.live.values()))
        status, text = await task
        got = events(text)
        assert status == 200 and len(got) == 11 and got[-1]["usage"]["completion_tokens"] == 10
        assert s.fleet.router.counts.reported_tokens == 3


async def test_a_client_that_leaves_ends_its_request_at_the_server_at_once():
    async with scene(1) as s:
        s.fakes[0].token_s = 0.01
        body = {"prompt": "x", "max_tokens": 10_000, "stream": True}
        async with s.client.post(s.url + "/v1/completions", json=body) as got:
            await got.content.readany()
        await until(lambda: s.fakes[0].num_aborted == 1, 1.0)
        # And one that waits for an answer that is not streamed.
        s.fakes[0].ttft_s = 30.0
        task = asyncio.create_task(s.ask())
        await until(lambda: len(s.fleet.router.ledger.live) == 1)
        task.cancel()
        await until(lambda: not s.fleet.router.ledger.live)


@pytest.mark.parametrize("mode", ["refusing", "full"])
async def test_a_refusal_goes_to_the_next_best_server(mode):
    async with scene(2, policy="round_robin") as s:
        s.fakes[0].mode = mode
        assert [(await s.ask())[0] for _ in range(4)] == [200] * 4
        assert len(s.fakes[1].requests) == 4
        assert sum(s.fleet.num_retries.values()) == len(s.fakes[0].requests) >= 1


async def test_if_all_servers_refuse_the_client_gets_the_refusal_as_it_came():
    async with scene(2) as s:
        for fake in s.fakes:
            fake.mode = "full"
        async with s.client.post(s.url + "/v1/completions", json={"prompt": "x"}) as got:
            assert got.status == 429 and got.headers["Retry-After"] == "3"
            assert (await got.json())["error"]["message"] == "no"
        assert [len(fake.requests) for fake in s.fakes] == [1, 1]


async def test_a_server_that_dies_before_the_first_byte_costs_no_request():
    async with scene(2, policy="round_robin") as s:
        s.fakes[0].ttft_s = 30.0
        waiting = [asyncio.create_task(s.stream()) for _ in range(6)]
        await until(lambda: s.fakes[0].num_active == 3)
        await s.fakes[0].stop()
        for status, text in await asyncio.gather(*waiting):
            assert status == 200 and len(events(text)) == 5
        assert s.fleet.router.servers == [s.fakes[1].url]


async def test_a_server_that_dies_in_a_stream_ends_it_with_an_error_and_no_other():
    async with scene(2, policy="round_robin") as s:
        for fake in s.fakes:
            fake.token_s = 0.02
        streams = [asyncio.create_task(s.stream(max_tokens=40)) for _ in range(6)]
        await until(lambda: sum(live.decoding for live in s.fleet.router.ledger.live.values()) == 6)
        await s.fakes[0].stop()
        ended = [events(text) for status, text in await asyncio.gather(*streams)]
        broken = [got for got in ended if "error" in got[-1]]
        assert len(broken) == 3 == s.fleet.num_broken
        for got in broken:
            assert set(got[-1]["error"]) == {"message", "type", "param", "code"} and len(got) > 1
            assert got[-1]["error"]["type"] == "server_error"
        assert all(len(got) == 41 for got in ended if got not in broken)
        assert s.fleet.router.servers == [s.fakes[1].url]


async def test_a_stream_that_is_cut_within_an_event_ends_with_whole_events():
    async with scene(1) as s:
        s.fakes[0].token_s = 0.01
        s.fakes[0].die_after, s.fakes[0].cut_event = 3, True
        _, text = await s.stream(max_tokens=9)
        got = events(text)
        assert len(got) == 4 and got[-1]["error"]["code"] == "server_failed"


async def test_a_wedged_server_is_found_by_its_probes_and_its_requests_go_elsewhere():
    async with scene(2, policy="round_robin") as s:
        s.fakes[0].mode = "wedged"
        answers = await asyncio.gather(*(s.stream() for _ in range(6)))
        assert [status for status, _ in answers] == [200] * 6
        assert s.fleet.router.servers == [s.fakes[1].url]
        s.fakes[0].mode = "ok"
        await until(lambda: len(s.fleet.router.servers) == 2)


async def test_a_server_that_streams_lives_whether_it_answers_probes_or_not():
    async with scene(1) as s:
        s.fakes[0].token_s = 0.02
        s.fakes[0].silent = {"/ready", "/health"}
        status, text = await s.stream(max_tokens=40)  # for 0.8 s, of which three missed probes take 0.45
        assert status == 200 and len(events(text)) == 41 and "error" not in text
        await until(lambda: not s.fleet.router.servers)


async def test_a_server_that_flaps_does_not_lose_requests():
    async with scene(3) as s:

        async def flap():
            for mode in ["refusing", "ok"] * 10:
                s.fakes[0].mode = mode
                await asyncio.sleep(0.03)

        flapping = asyncio.create_task(flap())
        while not flapping.done():
            answers = await asyncio.gather(*(s.ask() for _ in range(8)))
            assert [status for status, _ in answers] == [200] * 8
        await flapping


async def test_requests_that_every_server_refuses_take_no_server_away():
    async with scene(3, policy="round_robin") as s:
        for fake in s.fakes:
            fake.mode = "refusing"
        assert [(await s.ask())[0] for _ in range(12)] == [503] * 12
        for fake in s.fakes:
            fake.mode = "ok"
        assert [(await s.ask())[0] for _ in range(12)] == [200] * 12
        assert all(server.weight == 1 for server in s.fleet.servers.values())
        assert s.fleet.num_ready == 3


async def test_a_server_whose_probe_fails_after_a_request_did_gets_no_more():
    health = HealthSettings(probe_every_s=30.0, warm_s=0.0)
    async with scene(2, policy="round_robin", health=health) as s:
        s.fakes[0].mode, s.fakes[0].ready = "refusing", False
        assert (await s.ask())[0] == (await s.ask())[0] == 200
        server = s.fleet.servers[s.fakes[0].url]
        await until(lambda: s.fleet.state(server) == "draining", 1.0)


async def test_all_dead_is_503_and_says_so():
    async with scene(2) as s:
        for fake in s.fakes:
            await fake.stop()
        await until(lambda: not s.fleet.router.servers)
        status, answer = await s.ask()
        assert (status, answer["error"]["message"]) == (503, "no healthy server")
        assert (await s.get("/ready"))[0] == 503 and (await s.get("/health"))[0] == 200
        assert (await s.get("/v1/models"))[0] == 503
        await s.fakes[0].start(int(s.fakes[0].url.rpartition(":")[2]))
        await until(lambda: s.fleet.router.servers)
        assert (await s.ask())[0] == 200


async def test_a_drained_server_ends_what_it_has_and_gets_no_more_until_it_is_resumed():
    async with scene(2, policy="round_robin") as s:
        s.fakes[0].token_s = s.fakes[1].token_s = 0.01
        streams = [asyncio.create_task(s.stream(max_tokens=20)) for _ in range(2)]
        await until(lambda: s.fakes[0].num_active == 1)
        name = s.fakes[0].url.removeprefix("http://")
        async with s.client.post(f"{s.url}/servers/{name}/drain", json={}) as got:
            described = await got.json()
            assert described["state"] == "draining" and described["num_requests"] == 1
        for _, text in await asyncio.gather(*streams):
            assert len(events(text)) == 21
        for _ in range(4):
            assert (await s.ask())[0] == 200
        await asyncio.sleep(0.2)  # probes do not put it back
        assert len(s.fakes[0].requests) == 1
        async with s.client.post(f"{s.url}/servers/{name}/resume", json={}) as got:
            assert (await got.json())["state"] == "ready"
        for _ in range(4):
            assert (await s.ask())[0] == 200
        assert len(s.fakes[0].requests) == 3
        async with s.client.post(f"{s.url}/servers/nobody/drain", json={}) as got:
            assert got.status == 404 and name in (await got.json())["error"]["message"]


async def test_paths_methods_keys_and_sizes():
    async with scene(1, api_keys=("k1", "k2"), server_api_key="inner", max_body_bytes=2048) as s:
        paths = ["/v1/models", "/metrics", "/servers", "/version", "/nothing"]
        assert [(await s.get(path))[0] for path in paths] == [401] * 5
        assert (await s.ask())[0] == 401 and not s.fakes[0].requests
        assert [(await s.get(path))[0] for path in ("/health", "/ready")] == [200, 200]
        for wrong in ("k3", "k", "k1x", "", "\u00e9"):
            async with s.client.get(s.url + "/servers", headers={"Authorization": f"Bearer {wrong}"}) as got:
                assert got.status == 401
        s.client.headers["Authorization"] = "Bearer k1"
        assert [(await s.get(path))[0] for path in paths] == [200, 200, 200, 200, 404]
        assert (await s.get("/v1/completions"))[0] == 405
        assert (await s.ask())[0] == 200
        assert (await s.ask("x" * 4096))[0] == 413
        s.client.headers["Authorization"] = "Bearer k2"
        s.client.headers["X-Ksana-Client"] = "somebody else"
        assert (await s.ask())[0] == 200
        heads = [head for _, head, _ in s.fakes[0].requests]
        assert len(heads) == 2 and all(b"Authorization: Bearer inner" in head for head in heads)
        clients = [line for head in heads for line in head.split(b"\r\n") if line.startswith(b"X-Ksana-Client")]
        assert len(set(clients)) == 2 and not any(b"somebody" in line for line in clients)


async def test_what_no_server_understands_is_answered_by_a_server():
    async with scene(1) as s:
        for body in (b"{", b"[]", b'{"prompt": {"a": 1}}', b'{"messages": 3}', b"\xff", b""):
            async with s.client.post(s.url + "/v1/chat/completions", data=body) as got:
                await got.read()
        assert [body for _, _, body in s.fakes[0].requests][:2] == [b"{", b"[]"]
        assert (await s.ask())[0] == 200


async def test_metrics_have_the_choices_the_hits_and_no_error_of_the_ledger():
    async with scene(2) as s:
        s.fakes[0].cached_tokens = s.fakes[1].cached_tokens = 7
        for _ in range(5):
            await s.ask(list(range(64)))
        _, text = await s.get("/metrics")
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert sum(float(v) for k, v in values.items() if k.startswith("router:choices_total")) == 5
        assert float(values["router:hit_tokens_reported_total"]) == 35
        # Of 64 tokens, the last is not reused, nor is the rest of its block of 16.
        assert float(values["router:hit_tokens_expected_total"]) == 4 * 48
        assert float(values["router:ledger_unmatched"]) == 0
        assert 'router:server_state{server="' in text


async def test_a_full_queue_is_429_and_a_long_wait_408_and_the_rest_is_served_in_turn():
    async with scene(1, num_queued=2, max_requests_per_server=1, queue_timeout_s=0.3) as s:
        s.fakes[0].ttft_s = 0.2
        first = asyncio.create_task(s.stream())
        await until(lambda: s.fakes[0].num_active == 1)
        second = asyncio.create_task(s.stream())
        await until(lambda: len(s.proxy.turns.queue) == 1)
        third = asyncio.create_task(s.stream())
        await until(lambda: len(s.proxy.turns.queue) == 2)
        status, answer = await s.ask()
        assert status == 429 and "at most 2 may" in answer["error"]["message"]
        assert [(await task)[0] for task in (first, second, third)] == [200, 200, 408]
        gone = asyncio.create_task(s.stream())
        await until(lambda: s.fakes[0].num_active == 1)
        waiting = asyncio.create_task(s.stream())
        await until(lambda: len(s.proxy.turns.queue) == 1)
        waiting.cancel()
        await until(lambda: not len(s.proxy.turns.queue))
        assert (await gone)[0] == 200 and (await s.ask())[0] == 200


async def test_a_server_that_is_not_there_at_the_start_joins_later():
    async with scene(1) as s:
        await s.fleet.add("http://127.0.0.1:9")
        assert [state["state"] for state in (await s.get("/servers"))[1]["servers"]] == ["ready", "dead"]
        assert (await s.ask())[0] == 200
        with pytest.raises(ValueError, match="given twice"):
            await s.fleet.add("http://127.0.0.1:9")


async def test_the_client_reads_answers_as_openai_sends_them():
    async with scene(1) as s, aiohttp.ClientSession() as other:
        async with other.post(s.url + "/v1/completions", json={"prompt": "x", "stream": True}) as got:
            assert got.content_type == "text/event-stream"
            lines = [line async for line in got.content]
        assert lines[-2] == b"data: [DONE]\n"
