"""Keeps a request's output until its reader takes it, joined into one piece. Knows no engine and no threads."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from ksana_jax.core.outputs import CompletionOutput, RequestOutput

# Pieces kept side by side. Joining more of them at once copies a long unread text less often.
_MOST_PIECES = 16


class OutputBuffer:
    """Output of one request between the engine and its reader; used on the event loop only.

    A slow reader gets fewer and longer pieces: the engine never waits for it, and no more is kept than the answer.

    Attributes:
      listener: called by `notify`; None for a reader that waits for `arrival`.
    """

    def __init__(self) -> None:
        self.listener: Callable[[], None] | None = None
        self._pieces: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: RequestOutput) -> None:
        """Adds a delta; `notify` follows."""
        self._pieces.append(delta)
        if len(self._pieces) == _MOST_PIECES:
            self._pieces = [joined(self._pieces)]

    def notify(self) -> None:
        """Calls the listener, or wakes the reader if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.listener is not None:
            self.listener()

    def take(self) -> RequestOutput | None:
        """Returns all that is unread as one piece; None if there is nothing."""
        if not self._pieces:
            return None
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    def arrival(self) -> asyncio.Future[None]:
        """Returns a future that ends with the next `notify`; to be awaited when there is nothing to take.

        Raises:
          RuntimeError: another task is waiting for it.
        """
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("another task is reading this request's output")
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


def joined(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """Joins consecutive deltas of one request into one; see `Request.take_delta`."""
    last = pieces[-1]
    outputs = [_joined(parts) for parts in zip(*(piece.outputs for piece in pieces), strict=True)]
    scores = last.prompt_logprobs
    if scores is not None:
        scores = list(itertools.chain.from_iterable(piece.prompt_logprobs or () for piece in pieces))
    return dataclasses.replace(last, outputs=outputs, prompt_logprobs=scores)


def _joined(parts: Sequence[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    logprobs = last.logprobs
    if logprobs is not None:
        logprobs = list(itertools.chain.from_iterable(part.logprobs or () for part in parts))
    return dataclasses.replace(
        last,
        text="".join(part.text for part in parts),
        token_ids=list(itertools.chain.from_iterable(part.token_ids for part in parts)),
        logprobs=logprobs,
    )
