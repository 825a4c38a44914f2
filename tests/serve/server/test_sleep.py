"""A server puts its idle model to sleep, and gives the same answers after it has woken up."""

import time

from ksana_jax.engine.async_llm import AsyncLLM
from tests.engine import small
from tests.serve.server.serving import serving

ASKED = {"prompt": "the inn", "temperature": 0, "max_tokens": 4, "ignore_eos": True}


def until_asleep(llm) -> None:
    end = time.monotonic() + 20
    while not llm.is_sleeping:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_model_sleeps_after_its_last_request_and_wakes_for_the_next():
    llm = small.make_llm(small.Letters(), enable_prefix_caching=True)
    with serving(AsyncLLM.around(llm), sleep_after=0.1) as server:
        first = server.ask("POST", "/v1/completions", ASKED).json["choices"][0]["text"]
        until_asleep(llm)
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/"):
            assert server.ask("GET", path).status == 200
        assert llm.is_sleeping, "only requests wake it"
        assert server.ask("POST", "/v1/completions", ASKED).json["choices"][0]["text"] == first


def test_a_model_that_cannot_wake_up_is_reported_as_unavailable():
    llm = small.make_llm(small.Letters())
    with serving(AsyncLLM.around(llm), sleep_after=0.1, sleep_level=2) as server:
        until_asleep(llm)
        reply = server.ask("POST", "/v1/completions", ASKED)
        assert reply.status == 503 and "cannot wake up" in reply.error["message"]
