"""Clients that mean harm: each attack with its answer, and servers and other clients that do not notice."""

import asyncio
import json
import resource

import aiohttp
import hypothesis
import hypothesis.strategies as st
import pytest
import yarl

from ksana_jax.serve.router.proxy.fleet import what_failed
from ksana_jax.serve.router.proxy.prompts import PromptReader
from ksana_jax.serve.server.connections import FEWEST, default_limit
from tests.serve.router.proxy import fake_server
from tests.serve.router.proxy.harness import scene
from tests.serve.router.proxy.test_prompts import Pairs
from tests.serve.router.proxy.test_proxy import events, until

PATHS = [
    "/v1/models/..%2f..%2fmetrics",
    "/v1/models/..%2F..%2Fkv_events",
    "/v1/models/../../metrics",
    "/v1/models/%2e%2e/%2e%2e/metrics",
    "/v1/models/a/..%5c..%5cmetrics",
    "/v1/models/.",
]


@pytest.mark.parametrize("path", PATHS)
async def test_dot_segments_reach_no_other_path_of_a_server(path):
    async with scene(2, server_api_key="inner") as s:
        async with s.client.get(yarl.URL(s.url + path, encoded=True)) as got:
            assert got.status == 404 and (await got.json())["error"]["code"] == "path_not_found"
        own = {"/ready", "/metrics"}  # of the proxy's probes
        assert all(set(fake.got) <= own for fake in s.fakes)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("org%2Fname", "org%2Fname"),
        ("org/name", "org%2Fname"),
        ("a%3Fb=%23c", "a%3Fb%3D%23c"),
        ("%252e%252e%252fmetrics", "%252e%252e%252fmetrics"),
        ("a%20b%3A1", "a%20b%3A1"),
        ("%E4%BD%A0", "%E4%BD%A0"),
    ],
)
async def test_a_name_reaches_a_server_quoted(name, sent):
    async with scene(1) as s:
        async with s.client.get(yarl.URL(f"{s.url}/v1/models/{name}", encoded=True)) as got:
            assert got.status == 200
        assert s.fakes[0].got[-1] == f"/v1/models/{sent}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["\ud800", 1.5, 2**70]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("prompt", "messages", "max_tokens", "max_completion_tokens", "cache_salt", "add_special_tokens", "model")
BODIES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4).map(json.dumps) | JSON.map(json.dumps)


@pytest.mark.parametrize("prompts", [None, PromptReader(Pairs())], ids=["asked", "local"])
async def test_every_body_is_left_to_a_server_to_answer(prompts):
    bodies: list[str] = []

    @hypothesis.given(BODIES)
    @hypothesis.settings(max_examples=150)
    def draw(body):
        bodies.append(body)

    draw()
    known = [{"prompt": 5}, {"prompt": True}, {"prompt": 1.5}, {"prompt": [[[1]]]}, {"prompt": "x", "messages": 1}]
    known += [
        {"prompt": [1, 2], "cache_salt": "\ud800"},
        {"prompt": [1], "max_tokens": 2**70},
        {"max_tokens": -(2**70)},
    ]
    known += [{"messages": 3}, {"messages": [3]}, {"messages": [{"role": "user", "content": [[1]]}]}]
    bodies += [json.dumps(body) for body in known] + ["[" * 100_000, "\udcff"]
    async with scene(1, num_queued=4, prompts=prompts) as s:
        s.fakes[0].answers = 400
        for body in bodies:
            for path in ("/v1/completions", "/v1/chat/completions"):
                async with s.client.post(s.url + path, data=body.encode("utf-8", "surrogateescape")) as got:
                    assert got.status == 400 and (await got.json())["error"]["message"] == "no", body


async def test_a_prompt_that_a_server_refuses_to_tokenize_does_not_keep_others_from_it():
    async with scene(1) as s:
        s.fakes[0].tokenizes = 400
        assert (await s.ask("a bad one"))[0] == 200
        s.fakes[0].tokenizes = 200
        assert (await s.ask("a good one"))[0] == 200
        assert s.fakes[0].num_tokenized == 2


# ---------------------------------------------------------------------- operators


async def change(s, verb="drain", key=None, headers=None, **body):
    name = s.fakes[0].url.removeprefix("http://")
    headers = (
        {"Content-Type": "application/json"} | (headers or {}) | ({"Authorization": f"Bearer {key}"} if key else {})
    )
    async with s.client.post(f"{s.url}/servers/{name}/{verb}", headers=headers) as got:
        return got.status, (await got.json()).get("error", {}).get("code")


async def test_with_an_admin_key_no_other_key_sees_or_drains_servers():
    async with scene(1, api_keys=("client",), admin_keys=("admin",), server_api_key="inner") as s:
        for key in (None, "client", "inner", "admi"):
            assert await change(s, key=key) == (401, "invalid_api_key")
            headers = {"Authorization": f"Bearer {key}"}
            async with s.client.get(s.url + "/servers", headers=headers) as got:
                assert got.status == 401 and got.headers["WWW-Authenticate"] == "Bearer"
        assert s.fleet.num_ready == 1
        assert (await change(s, key="admin"))[0] == 200 and s.fleet.num_ready == 0
        # And it is none of the clients' keys.
        async with s.client.get(s.url + "/version", headers={"Authorization": "Bearer admin"}) as got:
            assert got.status == 401


@pytest.mark.parametrize(
    "headers",
    [{"X-Forwarded-For": "203.0.113.5"}, {"Forwarded": "for=203.0.113.5"}],
    ids=["through a proxy", "through a proxy, RFC 7239"],
)
async def test_without_an_admin_key_only_this_machine_drains_servers(headers):
    async with scene(1) as s:
        assert await change(s, headers=headers) == (403, "admin_key_required")
        async with s.client.get(s.url + "/servers", headers=headers) as got:
            assert got.status == 403
        assert (await change(s, headers={"Content-Type": "text/plain"}))[0] == 415
        assert s.fleet.num_ready == 1
        assert (await change(s))[0] == 200 and s.fleet.num_ready == 0


@pytest.mark.parametrize(
    ("remote", "status"),
    [
        ("127.0.0.1", 200),
        ("::1", 200),
        ("::ffff:127.0.0.1", 200),
        ("192.0.2.7", 403),
        ("::ffff:192.0.2.7", 403),
        ("", 403),
    ],
)
async def test_without_an_admin_key_another_machine_sees_no_servers(remote, status, monkeypatch):
    monkeypatch.setattr(aiohttp.web.BaseRequest, "remote", property(lambda request: remote))
    async with scene(1) as s:
        assert (await s.get("/servers"))[0] == status
        assert (await s.get("/version"))[0] == 200


HOSTS = [
    ("evil.example", 403),
    ("evil.example:80", 403),
    ("localhost@evil.example", 403),
    ("", 403),
    ("127.0.0.1.a", 403),
]
HOSTS += [("localhost", 200), ("LOCALHOST:1", 200), ("127.0.0.1:80", 200), ("[::1]:80", 200), ("Gpu1.lan", 200)]


@pytest.mark.parametrize(("host", "status"), HOSTS)
async def test_a_page_whose_name_leads_to_this_machine_gets_nothing(host, status):
    async with scene(1, allowed_hosts=("gpu1.lan",)) as s:
        for method, path in (("GET", "/v1/models"), ("GET", "/version"), ("POST", "/v1/completions")):
            async with s.client.request(method, s.url + path, json={}, headers={"Host": host}) as got:
                assert got.status == status
        async with s.client.get(s.url + "/servers", headers={"Host": host}) as got:
            assert got.status == (403 if host == "Gpu1.lan" else status)
        assert len(s.fakes[0].requests) == (status == 200)


@pytest.mark.parametrize("settings", [{"api_keys": ("k",)}, {"host": "0.0.0.0"}], ids=["with keys", "for others"])
async def test_other_names_are_those_of_a_proxy_with_keys_or_for_others(settings):
    async with scene(1, key="k", **settings) as s:
        url = s.url.replace("0.0.0.0", "127.0.0.1")
        async with s.client.get(url + "/v1/models", headers={"Host": "gpu1.lan"}) as got:
            assert got.status == 200


# ---------------------------------------------------------------------- connections

TIMEOUT_S = 0.3


async def until_closed(url: str, sent: bytes) -> tuple[bytes, float]:
    """The proxy's answer before it closes a connection that sends this much, and the seconds until then."""
    loop = asyncio.get_running_loop()
    parts = yarl.URL(url)
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    began = loop.time()
    writer.write(sent)
    try:
        data = await asyncio.wait_for(reader.read(), 10)
    except ConnectionResetError:
        data = b""
    writer.close()
    return data, loop.time() - began


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /health HT", b""),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", b""),
        (POST + b"Content-Length: 100\r\n\r\n{", b"HTTP/1.1 408"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{", b"HTTP/1.1 408"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200"),  # and then silent
    ],
    ids=["silent", "a line", "headers", "half a body", "half a chunk", "silent after a request"],
)
async def test_a_client_that_stalls_is_cut(sent, answer):
    async with scene(1, client_timeout_s=TIMEOUT_S) as s:
        (data, took_s), (status, _) = await asyncio.gather(until_closed(s.url, sent), s.ask())
        assert status == 200 and data.startswith(answer) and bool(data) == bool(answer)
        assert 0.9 * TIMEOUT_S < took_s < 5
        assert not s.fakes[0].requests or len(s.fakes[0].requests) == 1


async def test_a_byte_now_and_then_does_not_hold_a_connection():
    async with scene(1, client_timeout_s=TIMEOUT_S) as s:
        url = yarl.URL(s.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        closed = asyncio.create_task(reader.read())
        for byte in b"GET /health HTTP/1.1\r\nX: " + b"y" * 100:
            if closed.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.03)
        assert closed.done()
        writer.close()


async def test_a_client_that_does_not_read_its_stream_is_cut_and_its_request_ends(monkeypatch):
    monkeypatch.setattr(fake_server, "EVENT", b'data: {"text":"%b"}\n\n' % (b"x" * 2**17))
    async with scene(1, client_timeout_s=TIMEOUT_S) as s:
        url = yarl.URL(s.url)
        body = json.dumps({"prompt": "x", "max_tokens": 10**7, "stream": True}).encode()
        _, writer = await asyncio.open_connection(url.host, url.port, limit=2**12)
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: s.fakes[0].num_active == 1)
        await until(lambda: s.fakes[0].num_aborted == 1)
        writer.close()


async def test_a_stream_longer_than_the_timeout_is_not_cut():
    async with scene(1, client_timeout_s=0.2) as s:
        s.fakes[0].token_s = 0.05
        assert len(events((await s.stream(max_tokens=12))[1])) == 13


async def test_silent_connections_make_room_for_those_that_ask():
    async with scene(1, max_connections=8) as s:
        url = yarl.URL(s.url)
        silent = [await asyncio.open_connection(url.host, url.port) for _ in range(8)]
        assert (await s.ask())[0] == 200
        await until(lambda: silent[0][0].at_eof() or silent[0][0].exception() is not None)
        assert len(s.proxy.connections.open) <= 8
        for _, writer in silent:
            writer.close()
        await until(lambda: len(s.proxy.connections.open) <= 1)


async def test_requests_beyond_the_limit_of_connections_get_503_and_those_under_way_go_on():
    async with scene(1, max_connections=2) as s:
        s.fakes[0].token_s = 0.05
        streams = [asyncio.create_task(s.stream(max_tokens=10)) for _ in range(2)]
        await until(lambda: s.fakes[0].num_active == 2)
        async with aiohttp.ClientSession() as other, other.get(s.url + "/health") as got:
            assert got.status == 503 and got.headers["Retry-After"] == "1"
        assert [len(events((await stream)[1])) for stream in streams] == [11, 11]


@pytest.mark.parametrize(
    ("descriptors", "most"), [(1024, 496), (70, 19), (16, FEWEST), (resource.RLIM_INFINITY, 2**16), (2**30, 2**16)]
)
def test_the_limit_of_connections_leaves_a_descriptor_for_each_servers_side(descriptors, most, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (descriptors, descriptors))
    assert default_limit() == most


# ---------------------------------------------------------------------- what clients are told


@pytest.mark.parametrize("cut", [False, True])
async def test_the_error_of_a_stream_says_nothing_of_the_http_library(cut):
    async with scene(1) as s:
        s.fakes[0].token_s, s.fakes[0].die_after, s.fakes[0].cut_event = 0.01, 3, cut
        message = events((await s.stream(max_tokens=9))[1])[-1]["error"]["message"]
        name = s.fakes[0].url.removeprefix("http://")
        why = "it closed the connection before the end of its answer"
        assert message == f"server {name} failed: {why}, after a part of the answer was sent"


def test_each_failure_of_a_server_is_said_in_words():
    timed_out, odd = aiohttp.ServerTimeoutError("conn_timeout"), aiohttp.ClientResponseError(None, (), message="bad")
    assert what_failed(timed_out) == what_failed(TimeoutError()) == "it does not answer"
    assert what_failed(odd) == "its answer is not HTTP"
    for error in (aiohttp.ClientPayloadError("<TransferEncodingError>"), ConnectionResetError("Cannot write")):
        assert what_failed(error) == "it closed the connection before the end of its answer"


async def test_a_server_that_takes_long_to_answer_is_not_blamed(monkeypatch):
    monkeypatch.setattr("ksana_jax.serve.router.proxy.app.ANYWHERE_S", 0.05)
    async with scene(1) as s:
        s.fakes[0].silent = {"/tokenizer_info"}
        for _ in range(8):
            status, answer = await s.get("/tokenizer_info")
            assert status == 502 and answer["error"]["message"].endswith("failed: it does not answer")
        assert s.fleet.num_ready == 1 and (await s.ask())[0] == 200
