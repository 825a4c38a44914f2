"""Streams of tokens: written where they arrive while the client keeps up, and by the response's task otherwise."""

import asyncio
import http.client
import json
import socket

import numpy as np
import pytest

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.engine.output_buffer import OutputBuffer
from ksana_jax.engine.request_stream import RequestStream
from ksana_jax.serve.server.protocol import BODY_WRITER
from ksana_jax.serve.server.token_stream import TokenStream
from tests.serve.server.in_process import output, piece
from tests.serve.server.test_connections import body_of, expected, post, until_closed


class Client:
    """Both ends of a response: what is written past ASGI in capitals, what is sent through it as it is."""

    def __init__(self, num_streams: int = 1, ping_s: float = 60.0):
        self.got: list[str] = []
        self.is_ready, self.reads, self.left = True, asyncio.Event(), asyncio.Event()
        self.reads.set()
        self.mailboxes, self.aborted = [OutputBuffer() for _ in range(num_streams)], []
        streams = [
            RequestStream(str(number), np.zeros(1, np.int32), buffer, lambda n=number: self.aborted.append(n), True)
            for number, buffer in enumerate(self.mailboxes)
        ]
        response = TokenStream(streams, self._format, lambda: "last ", ping_s)
        scope = {"type": "http", "extensions": {BODY_WRITER: self}}
        self.ending = asyncio.ensure_future(response(scope, self._receive, self._send))

    def _format(self, number: int, new: RequestOutput) -> str:
        if new.outputs[0].text.startswith("bad"):
            raise ValueError("bad")
        return f"{number}{new.outputs[0].text} "

    def write(self, data: bytes) -> None:
        self.got.append(data.decode().upper())

    async def _receive(self) -> dict:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict) -> None:
        await self.reads.wait()
        self.got += [message["body"].decode()] if message.get("body") else []

    def put(self, text: str, number: int = 0, ends: str | None = None) -> None:
        self.mailboxes[number].put(output(piece(text, ends=ends)))
        self.mailboxes[number].notify()

    async def settle(self) -> list[str]:
        """Lets the task do what it can; returns all that the client has got."""
        for _ in range(10):
            await asyncio.sleep(0)
        return self.got


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def test_an_output_is_written_where_it_arrives():
    async def test():
        client = Client()
        client.put("a")
        assert await client.settle() == ["0a "], "what arrives before the response begins is sent by its task"
        client.put("b")
        client.put("c")
        assert client.got == ["0a ", "0B ", "0C "], "no task has run in between"
        client.put("d", ends="length")
        await client.ending
        assert client.got[3:] == ["0D ", "last data: [DONE]\n\n"] and not client.aborted

    run(test)


def test_outputs_of_a_client_that_does_not_read_are_joined_and_none_overtakes_another():
    async def test():
        client = Client(num_streams=2)
        await client.settle()
        client.is_ready = False
        client.reads.clear()
        client.put("a")
        await client.settle()  # the task waits with "a"
        for text in "bcd":
            client.put(text)
        client.put("x", 1)
        client.is_ready = True  # and yet, what the task holds goes first
        client.put("y", 1)
        assert await client.settle() == []
        client.reads.set()
        assert await client.settle() == ["0a ", "0bcd ", "1xy "]
        client.put("e", ends="stop")
        client.put("z", 1, ends="stop")
        await client.ending
        assert client.got[3:] == ["0E ", "1Z ", "last data: [DONE]\n\n"]

    run(test)


@pytest.mark.parametrize("ready", [True, False])
def test_an_output_that_cannot_be_formatted_ends_the_stream_with_an_error(ready):
    async def test():
        client = Client()
        await client.settle()
        client.is_ready = ready
        client.put("a")
        await client.settle()
        client.put("bad")
        client.put("c")
        await client.ending
        assert len(client.got) == 2 and client.got[0] == ("0A " if ready else "0a ")
        assert "ValueError" in client.got[-1] and client.got[-1].endswith("data: [DONE]\n\n")
        assert client.aborted == [0]

    run(test)


def test_the_requests_of_a_client_that_leaves_are_aborted():
    async def test():
        client = Client(num_streams=2)
        await client.settle()
        client.put("a")
        client.put("b", 1, ends="stop")
        client.left.set()
        await client.ending
        assert client.aborted == [0] and client.got == ["0A ", "1B "]
        client.put("c")
        assert await client.settle() == ["0A ", "1B "]

    run(test)


def test_a_comment_is_sent_in_silence_only():
    async def test():
        client = Client(ping_s=0.2)
        await client.settle()
        for _ in range(8):
            client.put("a")
            await asyncio.sleep(0.05)
        assert client.got == ["0A "] * 8
        await asyncio.sleep(0.3)
        assert ": ping\n\n" in client.got
        client.left.set()
        await client.ending

    run(test)


def test_a_connection_carries_one_stream_after_the_other(served):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    for prompt, count in (("one", 20), ("two", 30), ("three", 1)):
        body = body_of(prompt=prompt, max_tokens=count, stream=True, **GREEDY)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and text(response.read()) == expected(prompt, count)
    connection.close()


def test_a_client_of_http_1_0_gets_a_body_without_chunks(served):
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    connection.sendall(post(body_of(prompt="old", max_tokens=20, stream=True, **GREEDY)).replace(b"/1.1", b"/1.0", 1))
    head, _, body = until_closed(connection).partition(b"\r\n\r\n")
    assert b" 200 " in head and b"chunked" not in head.lower()
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n") and text(body) == expected("old", 20)


GREEDY = {"temperature": 0}


def text(body: bytes) -> str:
    events = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])
