"""A real server in a thread, around the real engine and a fake executor, and a client made of the standard library."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from ksana_jax.engine.async_llm import AsyncLLM
from ksana_jax.engine.engine import Engine
from ksana_jax.serve.server.running import RunningServer, listen
from ksana_jax.serve.server.settings import ServerSettings
from ksana_jax.serve.server.several import make_several_app
from ksana_jax.tokenizers import Tokenizer
from ksana_jax.tokenizers.base import NOTHING, Piece
from tests.fakes import VOCAB, make_engine

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
# The last two ids are the halves of é.
PIECES = [*(bytes([byte]) for byte in range(32, 32 + VOCAB - 2)), b"\xc3", b"\xa9"]


class Letters(Tokenizer):
    """One token for each printable ASCII character, and two for é."""

    source, vocab_size, chat_template, eos_token = "letters", VOCAB, TEMPLATE, "~"

    def piece(self, token_id: int) -> Piece:
        return Piece(PIECES[token_id]) if 0 <= token_id < VOCAB else NOTHING

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return [PIECES.index(bytes([byte])) for byte in text.encode()]
        except ValueError:
            raise ValueError(f"text {text!r:.40} has characters outside the vocabulary") from None


def text_of(ids) -> str:
    return b"".join(PIECES[token] for token in ids).decode("utf-8", "replace")


def make_llm(slow_s: float = 0.0, **settings: Any) -> AsyncLLM:
    """An engine of eight rows; slow_s: seconds that each step takes."""
    engine = make_engine(**{"num_blocks": 256, "max_num_seqs": 8, "max_model_len": 128, "caching": True, **settings})
    engine.tokenizer = engine.factory.tokenizer = Letters()
    if slow_s:
        slow(engine, slow_s)
    return AsyncLLM.around(engine)


def slow(engine: Engine, seconds: float) -> None:
    submit = engine.executor.submit

    def submit_slowly(step):
        time.sleep(seconds)
        return submit(step)

    engine.executor.submit = submit_slowly  # pyright: ignore[reportAttributeAccessIssue]


@dataclasses.dataclass
class Served:
    """A server that runs in a thread, and its engine."""

    llm: Any
    running: RunningServer
    port: int
    thread: threading.Thread
    exit_codes: list[int]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """Sends one request on a connection of its own; body: bytes, or what is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            kind = {} if body is None else {"content-type": "application/json"}
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {**kind, **given})
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> Reply:
        return self.ask("POST", path, fields)

    def stop(self) -> int:
        """Sends the signal to end, waits, and returns the exit code."""
        self.running._loop.call_soon_threadsafe(self.running.stop)
        self.thread.join(30)
        [code] = self.exit_codes
        return code

    def num_steps(self) -> int:
        """Number of steps of an idle engine, those that ran ahead included."""
        assert self.settled()
        count = -1
        while count != (count := len(self.llm.engine.records)):
            time.sleep(0.05)
        return count

    def settled(self) -> bool:
        """Waits until no request is left; returns whether no block is in use."""
        for _ in range(1000):
            stats = self.llm.stats()
            if not stats.num_requests and not self.llm.engine.has_work:
                return self.llm.stats().blocks_in_use == 0
            time.sleep(0.002)
        return False


@dataclasses.dataclass
class Reply:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert set(self.json) == {"error"} and set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Any]:
        """The JSON of a stream's events; the last one must be [DONE]."""
        *events, done, end = self.body.decode().split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


@contextlib.contextmanager
def serving(llm: AsyncLLM | None = None, **settings: Any) -> Iterator[Served]:
    """A server on a free port of the loopback; it ends with the block."""
    given, llm = ServerSettings(**{"port": 0, "shutdown_timeout_s": 10, **settings}), llm or make_llm()
    with _in_thread(lambda: llm, given) as served:
        served.llm = llm
        yield served


@contextlib.contextmanager
def _in_thread(load: Any, given: ServerSettings, app: Any = None) -> Iterator[Served]:
    listener, codes = listen(given), []
    running = RunningServer(load, given, listener, app)

    def run() -> None:
        import asyncio

        codes.append(asyncio.run(running.run()))

    thread = threading.Thread(target=run)
    thread.start()
    served = Served(None, running, listener.getsockname()[1], thread, codes)
    try:
        while thread.is_alive() and running.app.state.serving.status == "loading":
            time.sleep(0.001)
        yield served
    finally:
        if thread.is_alive():
            served.stop()
        assert not thread.is_alive()


@contextlib.contextmanager
def behind_one_door(llms: dict[str, AsyncLLM], **settings: Any) -> Iterator[Served]:
    """A server of several models, by their names."""
    given = ServerSettings(**{"port": 0, "shutdown_timeout_s": 10, **settings})
    app = make_several_app(list(llms), given)
    with _in_thread(lambda: app.state.serving.load(llms.__getitem__), given, app) as served:
        yield served
