"""An engine server without an engine: answers like `ksana serve`, at any speed, and fails on demand. Raw asyncio.

A step of the fake writes one event to every stream whose time has come, as an engine's step does. It runs inside a
test's event loop (`FakeServer`), or as a process of its own for measurements and kills (`python fake_server.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import deque

EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"fake","choices":[{"index":0,"text":" word",'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stream:
    """One answer that is being written."""

    def __init__(self, transport: asyncio.Transport, num_tokens: int, due_s: float, usage: bytes):
        self.transport, self.left, self.due_s, self.usage, self.started = transport, num_tokens, due_s, usage, False


class FakeServer:
    """Answers requests as told by its attributes, which may be changed at any time.

    Attributes:
      mode: "ok"; "wedged" accepts and never answers; "refusing" answers 503, "full" 429, to requests but not to probes.
      ready: whether probes are answered with 200, or with 503. silent: paths of GET that are never answered.
      answers, tokenizes: status of POST requests, and of /tokenize among them.
      ttft_s, token_s: time to the first event, and between events.
      die_after: closes the connection after this many events of a stream; None never does. cut_event: within the next.
      cached_tokens: what the usage reports.
      model: names of its models, separated by spaces. root: behind all names; empty for as many models.
      metrics: body of /metrics; {} while it is empty.
      got: paths of GET requests.
      requests: (path, headers, body) of each POST, but of /tokenize only their number, num_tokenized.
      num_aborted: streams whose reader left. num_active: open streams.
      events: bodies of /kv_events that are sent to each subscriber at once, as bytes of complete server-sent events.
    """

    def __init__(self, ttft_s: float = 0.0, token_s: float = 0.0, model: str = "fake"):
        self.ttft_s, self.token_s, self.model, self.root = ttft_s, token_s, model, ""
        self.mode, self.cached_tokens, self.metrics = "ok", 0, ""
        self.die_after: int | None = None
        self.ready, self.answers, self.tokenizes = True, 200, 200
        self.silent: set[str] = set()
        self.got: deque[str] = deque(maxlen=1000)
        self.cut_event = False
        self.requests: deque[tuple[str, bytes, bytes]] = deque(maxlen=10_000)
        self.num_aborted = self.num_active = self.num_tokenized = 0
        self.streams: dict[asyncio.Transport, Stream] = {}
        self.connections: set[Connection] = set()
        self.subscribers: list[asyncio.Transport] = []
        self.url = ""
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, port: int = 0) -> str:
        """Listens, and returns the URL."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), "127.0.0.1", port, backlog=2048)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.url

    async def stop(self) -> None:
        """Closes all connections without a word, like a killed process, and frees the port."""
        self._server.close()
        for connection in [*self.connections]:
            connection.transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await asyncio.sleep(0)

    def add(self, stream: Stream) -> None:
        self.streams[stream.transport] = stream
        self.num_active += 1
        if self._timer is None:
            self._step()

    def _step(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for transport, stream in [*self.streams.items()]:
            if stream.due_s > now or self.mode == "wedged":
                continue
            head = b"" if stream.started else STREAM_HEAD
            stream.started = True
            if self.die_after is not None and stream.left <= 0:
                self.end(transport)
                if self.cut_event:
                    transport.write(chunk(EVENT[:30]))
                    transport.close()
                else:
                    transport.abort()
            elif stream.left:
                stream.left -= 1
                transport.write(head + chunk(EVENT))
                stream.due_s = now + self.token_s
            else:
                transport.write(head + chunk(stream.usage) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
                self.end(transport)
        self._timer = None
        if self.streams:
            self._timer = loop.call_later(max(self.token_s / 4, 0.0005), self._step)

    def end(self, transport: asyncio.Transport) -> None:
        if self.streams.pop(transport, None) is not None:
            self.num_active -= 1


class Connection(asyncio.Protocol):
    """One kept-alive connection."""

    def __init__(self, fake: FakeServer):
        self.fake, self.buffer = fake, b""

    def connection_made(self, transport) -> None:
        self.transport: asyncio.Transport = transport
        self.fake.connections.add(self)

    def connection_lost(self, error) -> None:
        self.fake.connections.discard(self)
        if self.transport in self.fake.streams:
            self.fake.num_aborted += 1
            self.fake.end(self.transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            at = head.lower().find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body = self.buffer[end + 4 : end + 4 + length]
            self.buffer = self.buffer[end + 4 + length :]
            method, path, _ = head.split(b" ", 2)
            self.answer(method.decode(), path.decode(), head, body)

    def reply(self, status: int, body: bytes, extra: bytes = b"") -> None:
        self.transport.write(
            b"HTTP/1.1 %d x\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n%b"
            % (status, extra, len(body), body)
        )

    def answer(self, method: str, path: str, head: bytes, body: bytes) -> None:
        fake = self.fake
        if fake.mode == "wedged":
            return
        if method == "GET":
            fake.got.append(path)
            if path in fake.silent:
                return
            if path == "/ready" and not fake.ready:
                self.reply(503, b"{}")
            elif path == "/v1/models":
                known = {"object": "model", "max_model_len": 4096}
                models = [{"id": name, "root": fake.root or name, **known} for name in fake.model.split()]
                self.reply(200, json.dumps({"object": "list", "data": models}).encode())
            elif path == "/metrics" and fake.metrics:
                self.reply(200, fake.metrics.encode())
            elif path.startswith("/kv_events"):
                self.transport.write(STREAM_HEAD)
                fake.subscribers.append(self.transport)
            else:
                self.reply(200, b"{}")
            return
        if path == "/tokenize":
            fake.num_tokenized += 1
            self.reply(fake.tokenizes, json.dumps({"tokens": list(json.dumps(json.loads(body)).encode())}).encode())
            return
        fake.requests.append((path, head, body))
        status = {"refusing": 503, "full": 429}.get(fake.mode, fake.answers)
        if status != 200:
            error = b'{"error":{"message":"no","type":"server_error","param":null,"code":null}}'
            self.reply(status, error, b"Retry-After: 3\r\n")
            return
        asked = json.loads(body)
        num_tokens = asked.get("max_tokens") or 16
        usage = {
            "prompt_tokens": 5,
            "completion_tokens": num_tokens,
            "total_tokens": 5 + num_tokens,
            "prompt_tokens_details": {"cached_tokens": fake.cached_tokens},
        }
        if not asked.get("stream"):
            answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "fake", "usage": usage}
            answer["choices"] = [{"index": 0, "text": " word" * num_tokens, "finish_reason": "length"}]
            data = json.dumps(answer).encode()
            if fake.ttft_s or fake.token_s:
                delay_s = fake.ttft_s + num_tokens * fake.token_s
                asyncio.get_running_loop().call_later(delay_s, self.reply, 200, data)
            else:
                self.reply(200, data)
            return
        if fake.die_after is not None:
            num_tokens = min(num_tokens, fake.die_after)
        last = b'data: {"id":"cmpl-1","choices":[],"usage":%b}\n\n' % json.dumps(usage).encode()
        fake.add(Stream(self.transport, num_tokens, asyncio.get_running_loop().time() + fake.ttft_s, last))


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    args = parser.parse_args()
    print(await FakeServer(args.ttft_s, args.token_s).start(args.port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
