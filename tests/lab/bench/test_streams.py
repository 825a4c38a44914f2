"""`ksana bench streams` with a model that compiles in seconds."""

import socket
import threading

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench.core import Case
from ksana_jax.lab.bench.stream_client import read_streams
from ksana_jax.lab.bench.stream_server import StreamClient
from ksana_jax.lab.bench.streams import ASYNC, BLOCKING, HTTP, OFFLINE, WAYS, Streams, Words
from ksana_jax.lab.simulator.cost import AffineCost
from ksana_jax.lab.simulator.paced import pace
from tests.engine.small import Letters, assert_idle, make_llm


def test_every_way_generates_the_same_number_of_tokens():
    bench = Streams(streams=(4,), prompt=5, output_tokens=6, ways=tuple(WAYS))
    assert [case.label for case in bench.cases()] == [OFFLINE, BLOCKING, ASYNC, HTTP]
    bench.llm, bench.client = make_llm(Letters()), StreamClient()
    assert bench.processes() == [bench.client.pid]
    try:
        found = {case.label: bench.measure(case) for case in bench.cases()}
        prompts, params = bench._requests(4)
        counted = [way(prompts, params)["num_tokens"] for way in (bench._offline, bench._blocking, bench._http)]
    finally:
        bench.close()
    assert counted == [24, 24, 24]
    assert all(values["tokens_per_s"] > 0 for values in found.values())
    assert all(0 < found[way]["pieces_per_token"] <= 1 and found[way]["loop_s"] > 0 for way in (ASYNC, HTTP))
    assert found[HTTP]["client_s"] > 0
    assert_idle(bench.llm)


def test_a_paced_device_takes_its_time_in_place_of_computing():
    bench = Streams(streams=(4,), prompt=5, output_tokens=6, ways=("generate", "http"), paced="{}")
    bench.llm, bench.client = make_llm(Letters()), StreamClient()
    pace(bench.llm.engine, AffineCost(step_s=0.02, token_s=0.0))
    try:
        rates = [bench.measure(Case(way, {"streams": 4}))["tokens_per_s"] for way in (OFFLINE, HTTP)]
    finally:
        bench.close()
    # A step for each output token, and one token of each stream from each.
    assert all(0 < rate <= 4 / 0.02 for rate in rates)


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="level is 'fast', must be one of affine"):
        Streams(paced="{level: fast}").cases()
    with pytest.raises(ConfigError, match="streams is 0"):
        Streams(streams=(0,)).cases()
    with pytest.raises(ConfigError, match="ways has 'web', must have some of generate, stream, async, http"):
        Streams(ways=("web",)).cases()
    assert Case(ASYNC, {"streams": 2}).name == "AsyncLLM, streams 2"


def test_ids_of_a_model_without_a_tokenizer_are_words():
    words = Words(100)
    assert words.decode(words.encode("17 4 99")) == " 17 4 99" and words.decode([100, -1]) == ""


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}", "ended without"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "nothing for 0.2 seconds"),
    ],
    ids=["an error", "silence"],
)
def test_streams_without_their_end_are_failures(sent, error):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(sent)
                if "nothing" in error:
                    connection.recv(65536)  # until the client leaves

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises((ConnectionError, TimeoutError), match=error):
            read_streams(listener.getsockname()[1], "/", ["{}"], timeout_s=0.2 if "nothing" in error else 10)
        thread.join()
