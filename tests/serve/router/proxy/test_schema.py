"""A proxy answers as its server: schemathesis draws requests from the server's OpenAPI document, right and wrong."""

import asyncio
import contextlib
import threading

import hypothesis
import pytest
import requests
import schemathesis

from ksana_jax.serve.router.proxy.app import Proxy, running
from ksana_jax.serve.router.proxy.fleet import Fleet
from ksana_jax.serve.router.proxy.settings import ProxySettings
from ksana_jax.serve.server.openapi import document
from tests.serve.router.invariants import check_fleet
from tests.serve.server.serving import make_llm, serving
from tests.serve.server.test_schema import plain

# Paths that the proxy answers itself, or does not have.
OWN = {"/health", "/ready", "/version", "/openapi.json"}
OPERATIONS = [(path, method) for path, item in document("1")["paths"].items() for method in item if path not in OWN]


@contextlib.contextmanager
def proxy_of(server: str):
    """Runs a proxy before a server in a thread; yields its address."""
    loop, url, ready = asyncio.new_event_loop(), [], threading.Event()

    async def main():
        stop = asyncio.Event()
        async with Fleet(ProxySettings(port=0)) as fleet:
            await fleet.add(server)
            async with running(Proxy(fleet)) as address:
                url.extend((address, stop))
                ready.set()
                await stop.wait()
                check_fleet(fleet)
                assert fleet.num_ready == 1 and not fleet.num_broken

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield url[0]
    finally:
        loop.call_soon_threadsafe(url[1].set)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def urls():
    with serving(make_llm()) as server, proxy_of(own := f"http://127.0.0.1:{server.port}") as url:
        yield own, url


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_a_proxy_answers_as_its_server(urls, path, method, mode):
    if mode is schemathesis.GenerationMode.NEGATIVE and method == "get":
        pytest.skip("a GET has no body that could be wrong")
    operation = schemathesis.openapi.from_dict(document("1"))[path][method]
    positive, answered = mode is schemathesis.GenerationMode.POSITIVE, []

    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    @hypothesis.settings(max_examples=15, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    def check(case):
        case.body = plain(case.body) if positive else case.body
        own, passed = (case.call(base_url=url, timeout=60) for url in urls)
        answered.append(passed.status_code)
        assert passed.status_code == own.status_code < 500
        assert passed.headers["content-type"] == own.headers["content-type"]
        if own.status_code >= 400:
            assert passed.json() == own.json()

    check()
    assert (5 * answered.count(200) >= len(answered)) == positive, answered


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", '{"prompt": 5}', "prompt"),
        ("completions", '{"prompt": true}', "prompt"),
        ("completions", '{"prompt": 1.5}', "prompt"),
        ("completions", '{"prompt": [[[1]]]}', "prompt"),
        ("completions", '{"prompt": [1], "max_tokens": 1e99}', "max_tokens"),
        ("completions", '{"prompt": [1], "cache_salt": "\\ud800"}', None),
        ("chat/completions", '{"prompt": "x"}', "prompt"),
        ("chat/completions", '{"messages": [3]}', "messages"),
        ("completions", f'{{"prompt": "{"a" * 2**21}"}}', "prompt"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_a_body_that_its_server_refuses_gets_the_same_answer_with_the_field(urls, path, body, field):
    own, passed = (
        requests.post(f"{url}/v1/{path}", body, headers={"Content-Type": "application/json"}, timeout=10)
        for url in urls
    )
    assert passed.status_code == own.status_code == 400 and passed.json() == own.json()
    assert passed.json()["error"]["param"] == field
