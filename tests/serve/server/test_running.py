"""The server's lifetime: loading, draining, signals, failures of the engine."""

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from ksana_jax.cli.serving import _load, _with_cache
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.runner import compiling
from ksana_jax.runner.program_key import Lowering
from ksana_jax.serve.server.running import RunningServer, _memory, listen
from ksana_jax.serve.server.settings import ServerSettings
from tests.fakes import FULLY, reference_tokens
from tests.serve.server.serving import Letters, Served, make_llm, serving, text_of

FIELDS = {"prompt": "drain", "max_tokens": 60, "temperature": 0}


def expected(count):
    return text_of(reference_tokens(np.array(Letters().encode("drain")), count, FULLY))


class Asking:
    """Requests in threads of their own, which are under way when the constructor returns."""

    def __init__(self, server, count: int, **fields):
        self.replies = []
        threads = [threading.Thread(target=self._ask, args=(server, fields)) for _ in range(count)]
        for thread in threads:
            thread.start()
        self._threads = threads
        wait_for(lambda: server.llm.stats().num_requests == count)

    def _ask(self, server, fields):
        self.replies.append(server.post("/v1/completions", **{**FIELDS, **fields}))

    def join(self):
        for thread in self._threads:
            thread.join(30)
        return self.replies


def wait_for(condition) -> None:
    for _ in range(10_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it does not happen")


def signal_to(server) -> None:
    server.running._loop.call_soon_threadsafe(server.running.stop)


@pytest.mark.parametrize("stream", [False, True])
def test_accepted_requests_end_before_the_server(stream):
    with serving(make_llm(slow_s=0.01)) as server:
        asking = Asking(server, 6, stream=stream)
        signal_to(server)
        wait_for(lambda: server.ask("GET", "/ready").status == 503)
        assert server.ask("GET", "/ready").json == {"status": "draining"} and server.ask("GET", "/health").status == 200
        refused = server.post("/v1/completions", **FIELDS)
        assert (refused.status, refused.error["code"]) == (503, "draining") and int(refused.headers["retry-after"]) > 0
        for reply in asking.join():
            pieces = reply.events if stream else [reply.json]
            assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected(60)
        server.thread.join(30)
        assert server.exit_codes == [0]


@pytest.mark.parametrize("twice", [False, True])
def test_requests_that_take_too_long_end_with_an_error_event(twice):
    with serving(make_llm(slow_s=0.1), shutdown_timeout_s=60 if twice else 0.3) as server:
        streams = Asking(server, 3, stream=True)
        signal_to(server)
        if twice:
            wait_for(lambda: server.ask("GET", "/ready").status == 503)
            signal_to(server)
        for reply in streams.join():
            *pieces, last = reply.events
            assert last["error"]["code"] == "aborted" and last["error"]["type"] == "service_unavailable_error"
            text = "".join(piece["choices"][0]["text"] for piece in pieces)
            assert expected(60).startswith(text) and len(text) < 60
        server.thread.join(30)
        assert server.exit_codes == [0]


def test_whole_answers_that_take_too_long_are_told_503():
    with serving(make_llm(slow_s=0.1), shutdown_timeout_s=0.3) as server:
        asking = Asking(server, 2)
        signal_to(server)
        assert [(reply.status, reply.error["code"]) for reply in asking.join()] == [(503, "aborted")] * 2


def test_the_server_answers_while_the_model_loads():
    loading, settings = queue.Queue(), ServerSettings(port=0)
    listener, codes = listen(settings), []
    running = RunningServer(loading.get, settings, listener)

    def run():
        codes.append(asyncio.run(running.run()))

    thread = threading.Thread(target=run)
    thread.start()
    server = Served(None, running, listener.getsockname()[1], thread, codes)
    assert server.ask("GET", "/health").json == {"status": "loading"}
    assert server.ask("GET", "/ready").status == 503
    for path in ("/v1/models", "/tokenizer_info", "/metrics"):
        assert server.ask("GET", path).error["code"] == "loading"
    reply = server.post("/v1/completions", prompt="a")
    assert (reply.status, reply.error["code"]) == (503, "loading") and int(reply.headers["retry-after"]) > 0
    loading.put(make_llm())
    wait_for(lambda: server.ask("GET", "/ready").status == 200)
    assert server.post("/v1/completions", prompt="a").status == 200
    assert server.stop() == 0


def test_a_model_that_does_not_load_ends_the_server():
    settings = ServerSettings(port=0)

    def load():
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(RunningServer(load, settings, listen(settings)).run())


def test_a_failing_step_ends_the_requests_of_its_batch_only():
    with serving(make_llm(slow_s=0.01)) as server:
        asking = Asking(server, 3, stream=True)
        executor = server.llm.engine.executor
        executor.fails = "before moves"
        replies = asking.join()
        executor.fails = None
        for reply in replies:
            assert reply.events[-1]["error"]["type"] == "internal_error"
            assert b"Traceback" not in reply.body
        assert server.post("/v1/completions", **FIELDS).json["choices"][0]["text"] == expected(60)
        assert server.ask("GET", "/health").status == 200


def test_an_engine_that_fails_again_and_again_ends_the_server_with_exit_code_1():
    with serving(make_llm()) as server:
        server.llm.engine.executor.fails = "before moves"
        codes = []
        for _ in range(3):
            codes.append(server.post("/v1/completions", **FIELDS).status)
        assert codes == [500] * 3
        server.thread.join(30)
        assert server.exit_codes == [1]


def test_an_address_in_use_is_one_clear_error():
    settings = ServerSettings(port=0)
    with listen(settings) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            listen(ServerSettings(port=port))
    with pytest.raises(ConfigError, match="cannot listen on no"):
        listen(ServerSettings(host="no.such.host.invalid"))


def command(*arguments: str) -> subprocess.Popen:
    """`ksana serve` in a process of its own."""
    words = [sys.executable, "-m", "ksana_jax", "serve", *arguments]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def said(process: subprocess.Popen, what: str) -> str:
    """Reads what a server says until a line has some words; returns the line."""
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if what in line:
            return line
    raise AssertionError("".join(lines))


def test_prefixes_are_cached_unless_the_settings_say_otherwise():
    explained = {"enable_prefix_caching": True, "prefix_report_blocks": 4096}
    assert _with_cache({"block_size": 8}) == {"block_size": 8, **explained}
    assert _with_cache(dict.fromkeys(explained, 0)) == dict.fromkeys(explained, 0)


def test_a_server_says_what_it_does_until_it_serves(capfd):
    told, may_end = [], threading.Event()
    llm, settings = make_llm(), ServerSettings(port=0)

    def load():
        def lower(key):
            if key == 2:
                told.append(server.ask("GET", "/ready"))
            return jax.jit(lambda x: x + key).lower(1.0)

        assert may_end.wait(10)
        compiling.compile_all({key: Lowering(lower, key=key) for key in (1, 2, 3)}, workers=1)
        return llm

    listener = listen(settings)
    running = RunningServer(load, settings, listener)
    thread = threading.Thread(target=lambda: asyncio.run(running.run()))
    thread.start()
    server = Served(llm, running, listener.getsockname()[1], thread, [0])
    reply = server.ask("GET", "/ready")
    assert (reply.status, reply.json) == (503, {"status": "loading", "progress": "loading"})
    may_end.set()
    wait_for(lambda: server.ask("GET", "/ready").json == {"status": "ready"})
    assert server.stop() == 0 and not compiling.watchers
    assert told[0].json == {"status": "loading", "progress": "compiling 2 of 3"}
    said = capfd.readouterr().err.splitlines()
    assert said[0] == f"ksana: listening on http://127.0.0.1:{server.port}, loading the model"
    assert said[1:3] == ["ksana: compiling 1 of 3", "ksana: compiling 3 of 3"]


@pytest.mark.parametrize(("dtype", "said"), [("f32", "f32"), ("bf16", "bf16")])
def test_the_line_on_memory_names_the_dtype_of_keys_and_values_as_settings_do(dtype, said):
    llm = AsyncLLM("ksana-tiny", num_blocks=8, block_size=16, max_model_len=128, dtype=dtype)
    assert re.fullmatch(rf"memory: weights [\d.]+ MiB, KV pool .+ for 128 tokens in {said}", *_memory(llm))
    asyncio.run(llm.aclose())


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_under_load_loses_nothing_that_was_accepted(number):
    process = command("ksana-tiny", "--port", "0", "--no-warm-up", "block_size=8", "max_num_seqs=4", "num_blocks=256")
    try:
        port = int(said(process, "serving ksana-tiny").strip().rpartition(":")[2])
        server = Served(None, None, port, None, [])
        fields = {"prompt": "def main(", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
        [alone] = server.post("/v1/completions", **fields).json["choices"]
        replies = []
        threads = [
            threading.Thread(
                target=lambda: replies.append(server.post("/v1/completions", **fields, stream=True, n=2)),
            )
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        os.kill(process.pid, number)
        said(process, "shutting down")
        for thread in threads:
            thread.join(60)
        accepted = [reply for reply in replies if reply.status == 200]
        assert accepted and all(reply.status in (200, 503) for reply in replies) and len(replies) == 8
        for reply in accepted:
            texts = ["", ""]
            for event in reply.events:
                texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
            assert texts == [alone["text"]] * 2
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["nowhere", "--port", "0"], "nowhere"),
        (["ksana-tiny", "--port", "0", "block_sise=8"], "block_size"),
        (["ksana-tiny", "--port", "70000"], "port is 70,000, must be an integer from 0 to 65,535"),
        (["ksana-tiny", "--port", "0", "--api-key-file", "/dev/null"], "no API key"),
        (["ksana-tiny", "--port", "0", "max_model_len"], "is not an override"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, error):
    process = command(*arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    *progress, last = errors.splitlines()
    assert last.startswith("ksana: error: ") and error in last
    assert all(line.startswith("ksana: listening on ") for line in progress) and len(progress) <= 1


def test_a_full_queue_is_told_429():
    with serving(make_llm(slow_s=0.02), max_num_queued_reqs=4) as server:
        asking = Asking(server, 2, n=2)
        refused = server.post("/v1/completions", **FIELDS)
        assert (refused.status, refused.error["type"], refused.error["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(refused.headers["retry-after"]) >= 1 and "max_num_queued_reqs is 4" in refused.error["message"]
        assert all(reply.json["choices"][1]["text"] == expected(60) for reply in asking.join())
        assert server.post("/v1/completions", **FIELDS).status == 200
        assert server.post("/v1/completions", prompt=["a"] * 1000, n=2).error["param"] == "n"
        assert b"queue_full" in server.ask("GET", "/metrics").body


def test_a_server_says_how_many_programs_are_still_compiled():
    with serving(make_llm()) as server:
        assert server.ask("GET", "/ready").json == {"status": "ready"}
        server.llm.engine.num_compiling = 7
        reply = server.ask("GET", "/ready")
        assert reply.status == 200 and reply.json == {"status": "ready", "progress": "compiling 7 programs"}
        assert b'ksana:compiling{engine="",model_name="ksana"} 7.0' in server.ask("GET", "/metrics").body


def test_metrics_have_vllms_names(served):
    served.post("/v1/completions", **FIELDS)
    reply = served.ask("GET", "/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert b'vllm:generation_tokens_total{engine="0",model_name="ksana"}' in reply.body, reply.body


def test_an_engine_that_does_not_get_on_is_not_healthy(monkeypatch):
    monkeypatch.setattr("ksana_jax.serve.server.state.STALL_S", 0.3)
    with serving(make_llm()) as server:
        time.sleep(0.4)
        assert server.ask("GET", "/health").status == 200, "an idle engine does not step"
        held = threading.Event()
        submit = server.llm.engine.executor.submit
        server.llm.engine.executor.submit = lambda step: (held.wait(20), submit(step))[1]
        asking = Asking(server, 1)
        assert server.ask("GET", "/health").status == 200
        wait_for(lambda: server.ask("GET", "/health").status == 503)
        assert server.ask("GET", "/health").json == {"status": "stalled"}
        held.set()
        assert [reply.status for reply in asking.join()] == [200]


def test_a_warm_server_compiles_nothing_for_a_request_with_the_defaults():
    llm = _load(
        "ksana-tiny", {"max_num_seqs": 1, "max_model_len": 16, "max_num_batched_tokens": 16}, None, warm_up=True
    )
    assert llm.llm is not None
    with serving(llm) as served:
        wait_for(lambda: not llm.stats().num_compiling)
        before = llm.llm.num_compilations
        for fields in ({}, {"temperature": 0}):
            assert served.ask("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 3, **fields}).status == 200
        assert llm.llm.num_compilations == before
