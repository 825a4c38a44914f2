"""The output of one request of `AsyncLLM`, as its reader sees it. Knows the request's buffer and how to abort it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.engine.output_buffer import OutputBuffer, joined


class RequestStream:
    """The output of a request while it is generated: an asynchronous iterator for one reader, see `AsyncLLM.submit`.

    A request whose stream is closed, or dropped before its end, is aborted. Cancelling a task that waits for the next
    output leaves the stream open: `asyncio.wait_for(anext(stream), 15)` may be tried again.

    Attributes:
      request_id: as given, or assigned.
      prompt_token_ids: int32 [n].

    Args:
      buffer: where the output arrives, as deltas.
      abort: ends the request before the next step; may be called from any thread.
      delta: give out only what is new.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: np.ndarray,
        buffer: OutputBuffer,
        abort: Callable[[], None],
        delta: bool,
    ):
        self.request_id, self.prompt_token_ids = request_id, prompt_token_ids
        self._mailbox, self._abort, self._delta = buffer, abort, delta
        self._so_far: RequestOutput | None = None
        self._open = True

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Returns what the request has generated so far, or of deltas what is new; the last output is `finished`."""
        if not self._open:
            raise StopAsyncIteration
        while (output := self.take()) is None:
            await self._mailbox.arrival()
        return output

    def listen(self, arrived: Callable[[], None]) -> None:
        """Has a function called on the event loop whenever output has arrived, which it may `take`, and must not raise.

        It is called once now, for earlier arrivals.
        """
        self._mailbox.listener = arrived
        arrived()

    def take(self) -> RequestOutput | None:
        """Returns what the iterator would without waiting; None if nothing has arrived, or the stream has ended."""
        if not self._open or (output := self._mailbox.take()) is None:
            return None
        if not self._delta:
            output = self._so_far = output if self._so_far is None else joined([self._so_far, output])
        self._open = not output.finished
        return output

    async def result(self) -> RequestOutput:
        """Waits for the end; returns the whole output, or of deltas all that has not been read yet, as one.

        The request is aborted if the waiting task is cancelled.

        Raises:
          ValueError: nothing is left to read.
        """
        try:
            pieces = [output async for output in self]
        finally:
            self.close()
        if not pieces:
            raise ValueError(f"the output of request {self.request_id!r} has been read")
        return joined(pieces) if self._delta else pieces[-1]

    def close(self) -> None:
        """Aborts the request, if it has not ended, and ends the stream. May be called from any thread."""
        self._mailbox.listener = None
        if self._open:
            self._open = False
            self._abort()

    async def aclose(self) -> None:
        """Calls `close`, which waits for nothing: the engine ends the request before its next step."""
        self.close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
