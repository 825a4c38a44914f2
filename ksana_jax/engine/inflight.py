"""Tracks in-flight requests of `AsyncLLM`, and delivers their output to the event loop."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable

from ksana_jax.core.outputs import RequestOutput
from ksana_jax.engine.completion import Request
from ksana_jax.engine.engine_thread import StepNews
from ksana_jax.engine.output_buffer import OutputBuffer


@dataclasses.dataclass(eq=False)
class InflightRequest:
    """A request from its submission to its end.

    Attributes:
      replica: index of the one that serves it.
      ended: resolved at its end.
    """

    request: Request
    replica: int
    ended: asyncio.Future[None]
    buffer: OutputBuffer = dataclasses.field(default_factory=OutputBuffer)
    awaits_first_token: bool = True


class InflightRequests:
    """Bookkeeping on the event loop; only `post` is called by other threads.

    Attributes:
      by_id: the open requests.
      num_sequences: of the open requests; n completions of a prompt count n.
      num_prefill_tokens: prompt tokens of the open requests that have no first token yet.
      observers: called with each step's news, after the requests' readers were woken.
      failure: of the last step that has failed.
      has_dead: whether a replica computes no more steps.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, InflightRequest] = {}
        self.num_sequences = self.num_prefill_tokens = 0
        self.observers: list[Callable[[StepNews], None]] = []
        self.failure: BaseException | None = None
        self.has_dead = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self._posted: collections.deque[StepNews] = collections.deque()
        self._wakes = False

    def bind(self) -> asyncio.AbstractEventLoop:
        """Returns the running event loop, which becomes the one that all output goes to.

        Raises:
          RuntimeError: another event loop has been served before.
        """
        running = asyncio.get_running_loop()
        if self.loop is None:
            self.loop = running
        if self.loop is not running:
            raise RuntimeError("AsyncLLM serves one event loop: that of its first request")
        return running

    def open(self, request: Request, replica: int) -> InflightRequest:
        """Adds a request that is about to be sent to its replica."""
        found = self.by_id[request.request_id] = InflightRequest(request, replica, self.bind().create_future())
        self.num_sequences += request.params.num_sequences
        self.num_prefill_tokens += len(request.prompt_token_ids)
        return found

    def post(self, news: StepNews) -> None:
        """Sends a step's news to the event loop, which is woken once for all news since its last read.

        Raises:
          RuntimeError: the event loop is closed.
        """
        self._posted.append(news)
        if not self._wakes and self.loop is not None:
            self._wakes = True
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """Hands out all news. A reader is woken once, however many steps have come, as when the loop was held up."""
        self._wakes = False  # before reading: what is posted from now on wakes the loop again
        read: list[StepNews] = []
        while self._posted:
            read.append(self._posted.popleft())
        first: set[str] = set()
        arrived: dict[str, OutputBuffer] = {}
        for news in read:
            for request in news.first_tokens:
                if (found := self.by_id.get(request.request_id)) is not None:
                    self._prefilled(found)
                    first.add(request.request_id)
            for output in news.outputs:
                self._put(output, arrived)
            self.failure = news.failure or self.failure
            if news.dead:
                self.has_dead = True
                self._end_all(news.replica, arrived)
        # The newest requests are the last of a step: their first tokens would wait for all other readers.
        for name in sorted(arrived, key=lambda name: name not in first):
            arrived[name].notify()
        for news in read:
            for observe in self.observers:
                observe(news)

    def _put(self, output: RequestOutput, arrived: dict[str, OutputBuffer]) -> None:
        found = self.by_id.get(output.request_id)
        if found is None:
            return
        found.buffer.put(output)
        arrived[output.request_id] = found.buffer
        if output.finished:
            self._prefilled(found)
            del self.by_id[output.request_id]
            self.num_sequences -= found.request.params.num_sequences
            found.ended.set_result(None)

    def _prefilled(self, found: InflightRequest) -> None:
        if found.awaits_first_token:
            found.awaits_first_token = False
            self.num_prefill_tokens -= len(found.request.prompt_token_ids)

    def _end_all(self, replica: int, arrived: dict[str, OutputBuffer]) -> None:
        """Ends requests that their replica's thread has not seen: it has ended before."""
        failure = self.failure or RuntimeError("the engine has been closed")
        for found in [found for found in self.by_id.values() if found.replica == replica]:
            found.request.fail(failure)
            self._put(found.request.take_delta(), arrived)
