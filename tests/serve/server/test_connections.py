"""Connections that stall, leave or send too much, while a canary stream runs on to its expected end."""

import asyncio
import http.client
import json
import socket
import struct
import threading
import time

import numpy as np
import pytest

from ksana_jax.serve.server.connections import Connections
from tests.fakes import FULLY, reference_tokens
from tests.serve.server.in_process import output, piece
from tests.serve.server.serving import Letters, make_llm, serving, text_of

PROMPT = "canary"
STEP_S = 0.01
CLIENT_TIMEOUT_S = 0.4


def expected(prompt, count):
    return text_of(reference_tokens(np.array(Letters().encode(prompt)), count, FULLY))


@pytest.fixture(scope="module")
def slow():
    with serving(make_llm(slow_s=STEP_S), client_timeout_s=CLIENT_TIMEOUT_S) as server:
        yield server


@pytest.fixture
def canary(slow):
    """A stream that runs for most of a second beside each test."""
    found = []
    fields = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True}
    thread = threading.Thread(target=lambda: found.append(slow.post("/v1/completions", **fields)))
    thread.start()
    yield
    thread.join(30)
    [reply] = found
    text = "".join(event["choices"][0]["text"] for event in reply.events)
    assert text == expected(PROMPT, 60)


def connect(server, **options) -> socket.socket:
    found = socket.socket()
    if "receive_buffer" in options:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive_buffer"])
    found.settimeout(10)
    found.connect(("127.0.0.1", server.port))
    return found


def until_closed(connection: socket.socket) -> bytes:
    """Reads to the end; a connection that is reset has ended too."""
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    connection.close()
    return data


def post(body: bytes, length: int | None = None, path: str = "/v1/completions") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % (len(body) if length is None else length) + body


def body_of(**fields) -> bytes:
    return json.dumps({"prompt": "leaving", "max_tokens": 80, **fields}).encode()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "],
    ids=["nothing", "a line", "headers"],
)
def test_half_of_a_request_is_cut_after_the_timeout(slow, canary, sent):
    connection, began = connect(slow), time.monotonic()
    connection.sendall(sent)
    assert until_closed(connection) == b""
    assert CLIENT_TIMEOUT_S * 0.9 < time.monotonic() - began < 8


def test_half_of_a_second_request_is_cut_after_the_timeout(slow, canary):
    connection, data = connect(slow), b""
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while not data.endswith(b"}"):
        data += connection.recv(65536)
    connection.sendall(b"G")  # from here on uvicorn, which closes idle connections after 5 s, would wait
    assert until_closed(connection) == b""


def test_a_byte_now_and_then_does_not_hold_a_connection(slow, canary):
    connection, began = connect(slow), time.monotonic()
    with pytest.raises(OSError):
        for byte in b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
    assert time.monotonic() - began < 8
    connection.close()


def test_half_of_a_body_is_answered_with_408(slow, canary):
    connection = connect(slow)
    connection.sendall(post(b'{"prompt": "a', length=100))
    reply = until_closed(connection)
    assert reply.startswith(b"HTTP/1.1 408") and b"did not arrive within 0.4 seconds" in reply


@pytest.mark.parametrize(
    "headers",
    [b"x: " + b"y" * 2**20 + b"\r\n", b"".join(b"x-%d: y\r\n" % n for n in range(10_000)), b"x\x00y: z\r\n"],
    ids=["a megabyte", "ten thousand", "a zero byte"],
)
def test_hostile_headers_are_refused(slow, canary, headers):
    connection = connect(slow)
    try:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n")
    except OSError:  # it has been cut before all was sent
        pass
    reply = until_closed(connection)
    assert reply == b"" or reply.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


def test_a_body_far_longer_than_allowed_is_refused_before_it_is_read(slow, canary):
    connection = connect(slow)
    connection.sendall(post(b"", length=100 * 2**20))
    assert until_closed(connection).startswith(b"HTTP/1.1 413")


def test_chunks_that_never_end_are_refused(slow, canary):
    connection = connect(slow)
    kinds = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + kinds)
    with pytest.raises(OSError):  # it is cut
        for _ in range(200):
            connection.sendall(b"100000\r\n" + b" " * 2**20 + b"\r\n")
    connection.close()


def hard_close(connection: socket.socket) -> None:
    """Closes with a reset, as a process does that is killed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def steps_until_idle(server, num_others: int) -> int:
    """Waits until no more than some other requests are left; returns the number of steps that took."""
    executor = server.llm.engine.executor
    first = len(executor.steps)
    for _ in range(5000):
        if server.llm.stats().num_requests <= num_others:
            return len(executor.steps) - first
        time.sleep(0.001)
    raise AssertionError("the request goes on")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("close", [socket.socket.close, hard_close], ids=["closed", "reset"])
def test_a_client_that_leaves_has_its_request_aborted_within_two_steps(stream, phase, close):
    # Prefills in chunks of four tokens; two rows, which the others fill.
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 4, "query_tile": 4, "slow_s": 0.05}
    with serving(make_llm(**settings)) as server:
        others = [connect(server) for _ in range(2 if phase == "queued" else 0)]
        for other in others:
            other.sendall(post(body_of(stream=True)))
            assert other.recv(10)
        before = server.llm.stats()
        connection = connect(server)
        connection.sendall(post(body_of(stream=stream, prompt="x" * (40 if phase == "prefill" else 2))))
        wait_for(lambda: server.llm.stats().num_requests > before.num_requests)
        if phase == "prefill":
            wait_for(lambda: server.llm.stats().num_running == 1)
        if phase == "decode":
            wait_for(lambda: server.llm.stats().num_prefill_tokens == 0)
        close(connection)
        assert steps_until_idle(server, len(others)) <= 3  # the one under way, and two
        for other in others:
            other.close()
        assert server.settled()


def wait_for(condition, seconds: float = 10.0) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it does not happen")


def test_a_client_that_leaves_after_the_last_token_loses_nothing(slow):
    connection = connect(slow)
    connection.sendall(post(body_of(max_tokens=1, stream=True)))
    while b"[DONE]" not in connection.recv(65536):
        pass
    connection.close()
    assert slow.settled()


class Endless:
    """A stream of long texts, without end."""

    closed = False

    def listen(self, arrived):
        self.arriving = asyncio.ensure_future(self._arrive(arrived))

    async def _arrive(self, arrived):
        while not self.closed:
            await asyncio.sleep(0)
            arrived()
            self.unread = True

    def take(self):
        unread, self.unread = self.unread, False
        return output(piece("x" * 2**16, [1])) if unread else None

    unread = True

    def close(self):
        self.closed = True


def test_a_client_that_does_not_read_is_cut(slow, canary, monkeypatch):
    stream, submit_all = Endless(), slow.llm.submit_all

    async def submit(prompts, params, ids, **settings):
        if prompts[0]["prompt"] == PROMPT:
            return await submit_all(prompts, params, ids, **settings)
        return [stream]

    monkeypatch.setattr(slow.llm, "submit_all", submit)
    connection = connect(slow, receive_buffer=4096)
    connection.sendall(post(body_of(stream=True)))
    began = time.monotonic()
    wait_for(lambda: stream.closed)
    assert time.monotonic() - began > CLIENT_TIMEOUT_S * 0.9
    connection.close()


def test_readers_that_are_slow_but_read_get_everything(slow, canary):
    connection = connect(slow, receive_buffer=4096)
    connection.sendall(post(body_of(stream=True, temperature=0)))
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(512)
        time.sleep(0.01)
    connection.close()
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected("leaving", 80)


def test_pipelined_requests_are_answered_in_turn(slow, canary):
    connection = connect(slow)
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 3)
    data = b""
    while data.count(b'{"status":"ready"}') < 3:
        data += connection.recv(65536)
    connection.close()


def test_hundreds_of_idle_connections_do_no_harm(slow, canary):
    idle = [connect(slow) for _ in range(300)]
    assert slow.ask("GET", "/health").status == 200
    for connection in idle:
        assert until_closed(connection) == b""


def test_a_small_event_does_not_wait_for_the_acknowledgement_of_the_one_before(slow):
    def accepted():
        return [one for one in list(slow.running._server.server_state.connections) if one.client == client]

    with connect(slow) as connection:
        client = connection.getsockname()
        wait_for(accepted)
        given = accepted()[0].transport.get_extra_info("socket")
        assert given.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "Nagle's algorithm holds it back"


def test_a_connection_is_used_again(slow):
    connection = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=10)
    for _ in range(3):
        connection.request("POST", "/v1/completions", body_of(max_tokens=1), {"content-type": "application/json"})
        assert connection.getresponse().read()
    connection.close()


async def test_a_request_sent_before_the_last_answer_ended_stops_the_clock():
    class Transport(asyncio.Transport):
        aborted = False

        def abort(self):
            self.aborted = True

        def get_write_buffer_size(self):
            return 0

    connections, transport = Connections(asyncio.Protocol, 0.02), Transport()
    connections().connection_made(transport)
    connections.began(transport)
    connections.began(transport)
    connections.ended(transport)
    await asyncio.sleep(0.06)
    assert not transport.aborted
    connections.ended(transport)
    await asyncio.sleep(0.06)
    assert transport.aborted and not connections.open
