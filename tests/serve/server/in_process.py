"""Asks the application in process and reads its output byte by byte, with streams of outputs from a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from ksana_jax.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from ksana_jax.core.request import FinishReason


def output(
    *completions: CompletionOutput, cached: int = 0, prompt_ids: Sequence[int] = (), prompt_scores: Any = None
) -> RequestOutput:
    """A delta of a request with these completions; prompt_scores: of the prompt's tokens after the first."""
    finished = all(completion.finished for completion in completions)
    logprobs = None if prompt_scores is None else [None, *_logprobs(prompt_scores)]
    metrics = RequestMetrics(0.0)
    return RequestOutput("r", None, list(prompt_ids), list(completions), finished, metrics, logprobs, cached)


def piece(
    text: str,
    ids: Sequence[int] = (0,),
    index: int = 0,
    ends: str | None = None,
    scores: Sequence[dict[int, float]] | None = None,
    error: str | None = None,
) -> CompletionOutput:
    """A delta of a completion; scores: {token: log-probability} of each token, the most probable one first."""
    logprobs = None if scores is None else _logprobs(scores)
    reason = None if ends is None else FinishReason(ends)
    return CompletionOutput(index, text, list(ids), logprobs, reason, error=error)


def _logprobs(scores: Sequence[dict[int, float]]) -> list[dict[int, Logprob]]:
    return [{t: Logprob(v, rank + 1) for rank, (t, v) in enumerate(of.items())} for of in scores]


class Scripted:
    """A stream with outputs written beforehand: deltas, seconds to wait, or an exception to raise."""

    def __init__(self, script: Sequence[RequestOutput | float | Exception]):
        self._script, self._arrived, self.closed = list(script), [], False

    def listen(self, arrived: Callable[[], None]) -> None:
        self._playing = asyncio.ensure_future(self._play(arrived))

    async def _play(self, arrived: Callable[[], None]) -> None:
        for one in self._script:
            if isinstance(one, float):
                await asyncio.sleep(one)
            else:
                self._arrived.append(one)
                arrived()

    def take(self) -> RequestOutput | None:
        if not self._arrived:
            return None
        if isinstance(one := self._arrived.pop(0), Exception):
            raise one
        return one

    def close(self) -> None:
        self.closed = True


async def ask(
    app: Any, path: str, fields: dict[str, Any], sent: Callable[[dict], None] | None = None
) -> tuple[int, dict[str, str], list[bytes]]:
    """Posts a request; returns status, headers and the pieces of the body, one for each write."""
    messages: list[dict] = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]
    written: list[dict] = []

    async def receive():
        if messages:
            return messages.pop()
        await asyncio.Event().wait()

    async def send(message):
        written.append(message)
        if sent is not None:
            sent(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    await app({**scope, "http_version": "1.1", "scheme": "http", "server": ("x", 1), "client": ("y", 2)}, receive, send)
    start, *body = written
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    assert not body[-1]["more_body"] and all(message["more_body"] for message in body[:-1])
    return start["status"], found, [message["body"] for message in body]
