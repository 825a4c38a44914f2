"""The thread that runs one engine's steps for `AsyncLLM`. Knows requests, no event loop."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ksana_jax.core.metrics import StepRecord
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.engine.completion import Request
from ksana_jax.engine.distributed.replicas import Replicas
from ksana_jax.engine.engine import Engine

# Steps that may fail one after the other before the engine counts as dead.
MAX_FAILURES = 3
# Records of steps that stay in the engine: it may run for months.
MAX_RECORDS = 4096

logger = logging.getLogger("ksana_jax")


class StepNews(NamedTuple):
    """Results of one replica's step.

    outputs: deltas, one per request that has something new. first_tokens: requests whose first token it has sampled.
    records: of the steps computed since the last news. failure: of the step; it has ended all requests of the replica.
    dead: no more steps come; requests that have not ended never will.
    """

    replica: int
    outputs: Sequence[RequestOutput] = ()
    first_tokens: Sequence[Request] = ()
    records: Sequence[StepRecord] = ()
    failure: BaseException | None = None
    dead: bool = False


class EngineThread:
    """Steps one engine while it has requests, and sleeps otherwise. The other methods may be called from any thread.

    Args:
      index: of the replica whose engine it runs.
      post: takes each step's news, in the thread; raises if no reader is left, which ends the thread.
    """

    def __init__(self, replicas: Replicas, index: int, post: Callable[[StepNews], None]):
        self._replicas, self._index, self._post = replicas, index, post
        self._engine: Engine = replicas.engines[index]
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[str, tuple[Request, int]] = {}  # those in the engine, with their loads
        self._news: dict[Request, None] = {}
        self._first_tokens: list[Request] = []
        self._records: list[StepRecord] = []
        self._num_failures = 0
        self._stopping = False
        self._has_aborted = False  # since the last step, which makes the moves of blocks that are left
        self._thread = threading.Thread(target=self._run, name=f"ksana-engine-{index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: Request, load: int) -> None:
        """Adds a new request. load: as `Replicas.assign` has counted it; released when the request ends."""
        self._commands.put(functools.partial(self._add, request, load))

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; unknown and finished ones are ignored."""
        self._commands.put(functools.partial(self._abort, request_id))

    def call(self, function: Callable[[Engine], None]) -> None:
        """Calls a function with the engine between two steps; it must not raise."""
        self._commands.put(functools.partial(function, self._engine))

    def stop(self) -> None:
        """Aborts all requests before the next step, and ends the thread."""
        self._commands.put(self._stop)

    def join(self, timeout_s: float | None = None) -> None:
        """Waits for the end of the thread."""
        if self._thread is not threading.current_thread():  # where Python may collect an `AsyncLLM` that was dropped
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        with self._replicas.replicas[self._index].on_device() as engine:
            engine.observers.append(self._observe)
            try:
                self._serve(engine)
            finally:
                engine.observers.remove(self._observe)

    def _serve(self, engine: Engine) -> None:
        """Alternates commands and steps until it is told to stop, or too many steps have failed."""
        try:
            while (not self._stopping or self._busy) and self._num_failures < MAX_FAILURES:
                outputs, failure = [], None
                try:
                    self._obey(wait=not self._busy)
                    self._has_aborted &= bool(self._news)  # they come before a step
                    outputs = engine.advance(self._news, Request.take_delta)
                except Exception as error:
                    failure = error
                    self._fail(error)
                self._report(outputs, failure)
        finally:
            self._leave()

    @property
    def _busy(self) -> bool:
        """True if there is something to compute or to report."""
        engine = self._engine
        return bool(self._news) or engine.has_work or engine.num_steps_under_way > 0 or self._has_aborted

    def _obey(self, wait: bool) -> None:
        """Executes the queued commands. wait: for at least one."""
        while not self._stopping:
            try:
                command = self._commands.get(wait)
            except queue.Empty:
                return
            command()
            wait = False

    def _add(self, request: Request, load: int) -> None:
        self._requests[request.request_id], request.news = (request, load), self._news
        try:
            self._engine.add([request])
        except Exception as error:  # a scheduling policy may be a user's own and raise anything
            request.fail(error)

    def _abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self._has_aborted = True
            self._engine.abort(request_id)

    def _stop(self) -> None:
        self._stopping = True
        for request_id in list(self._requests):
            self._abort(request_id)

    def _observe(self, engine: Engine) -> None:
        """Records a successful step, whichever thread computed it."""
        self._num_failures = 0
        self._first_tokens += engine.first_tokens
        self._records.append(engine.records[-1])
        if len(engine.records) > 2 * MAX_RECORDS:
            del engine.records[:-MAX_RECORDS]

    def _fail(self, error: Exception) -> None:
        """Ends the requests: the engine has, unless it could not clean up."""
        self._num_failures += 1
        logger.error(
            "a step has failed, which ends %d requests: %s: %s", len(self._requests), type(error).__name__, error
        )
        for request, _ in self._requests.values():
            if not request.finished:
                request.fail(error)

    def _report(self, outputs: Sequence[RequestOutput], failure: BaseException | None, dead: bool = False) -> None:
        """Posts news, if there are any."""
        for output in outputs:
            if output.finished and output.request_id in self._requests:
                _, load = self._requests.pop(output.request_id)
                self._replicas.release(self._index, load)
        first, self._first_tokens = self._first_tokens, []
        records, self._records = self._records, []
        if outputs or first or records or failure or dead:
            self._post(StepNews(self._index, outputs, first, records, failure, dead))

    def _leave(self) -> None:
        """Ends all requests that are still in the engine, and says that nothing more will come."""
        with contextlib.suppress(Exception):  # the reader may have left, or the engine may be unable to recover
            for request_id in list(self._requests):
                self._engine.abort(request_id)
        outputs = [request.take_delta() for request in self._news]
        self._news.clear()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._report(outputs, None, dead=True)
