"""Load clients in raw asyncio, cheap compared with the measured server, with kept-alive connections."""

from __future__ import annotations

import asyncio
import json
import time


class Client(asyncio.Protocol):
    """Sends one request after the other on one connection until told to stop.

    Attributes:
      ttft_s: times from a request to the first byte of its answer. num_done, num_events: answers and events read.
      num_failed: connections that closed within an answer, and statuses other than 200.
    """

    def __init__(self, request: bytes, stream: bool):
        self.request, self.stream = request, stream
        self.ttft_s: list[float] = []
        self.num_done = self.num_events = self.num_failed = 0
        self.stopping, self.busy, self.tail, self.first = False, False, b"", True
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.send()

    def send_again(self) -> None:
        self.send()

    def send(self) -> None:
        self.busy = True
        self.first, self.tail, self.sent_s = True, b"", time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.first:
            self.first = False
            self.ttft_s.append(time.perf_counter() - self.sent_s)
            if data[9:12] != b"200":
                self.num_failed += 1
        self.num_events += data.count(b"data: {")
        self.tail = (self.tail + data)[-2048:]
        if self.tail.endswith(b"\r\n0\r\n\r\n") if self.stream else self._whole():
            self.num_done += 1
            self.busy = False
            if self.stopping:
                self.transport.close()
            else:
                self.send_again()

    def _whole(self) -> bool:
        head, found, body = self.tail.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        return bool(found) and len(body) >= int(head[at + 15 :].split(b"\r\n", 1)[0])

    def connection_lost(self, error) -> None:
        if not self.stopping:
            self.num_failed += 1
        if not self.done.done():
            self.done.set_result(None)


def request_bytes(host: str, stream: bool, max_tokens: int, prompt: str) -> bytes:
    body = json.dumps({"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def closed_loop(url: str, num_connections: int, seconds: float, stream: bool, max_tokens: int, prompt="hi there"):
    """Returns the clients after they sent requests one after the other for some seconds."""
    host, _, port = url.removeprefix("http://").partition(":")
    request = request_bytes(host, stream, max_tokens, prompt)
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(num_connections):
        _, client = await loop.create_connection(lambda: Client(request, stream), host, int(port))
        clients.append(client)
    await asyncio.sleep(seconds)
    for client in clients:
        client.stopping = True
    await asyncio.wait([client.done for client in clients], timeout=5)
    return clients


async def open_loop(url: str, rate: float, seconds: float, max_tokens: int = 4) -> list[float]:
    """Sends streams at a constant rate, whatever comes back; returns their times to the first byte, in seconds.

    A stream takes a free connection, so that times to connect do not count.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    request = request_bytes(host, True, max_tokens, "hi there")
    loop, free, all_clients, times = asyncio.get_running_loop(), [], [], []

    class OneAtATime(Client):
        def connection_made(self, transport) -> None:
            self.transport = transport

        def send_again(self) -> None:
            pass

    for _ in range(64):
        _, client = await loop.create_connection(lambda: OneAtATime(request, True), host, int(port))
        all_clients.append(client)
        free.append(client)
    began, count = loop.time(), int(rate * seconds)
    for index in range(count):
        await asyncio.sleep(max(began + index / rate - loop.time(), 0))
        free = free or [c for c in all_clients if c.num_done == len(c.ttft_s) and not c.busy]
        if free:
            free.pop().send()
    await asyncio.sleep(0.5)
    for client in all_clients:
        client.stopping = True
        times += client.ttft_s
        client.transport.close()
    return times
