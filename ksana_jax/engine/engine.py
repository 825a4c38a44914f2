"""Requests of an engine: added, reported after each step, ended. Knows requests and rows; no jax, no files."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.outputs import RequestOutput
from ksana_jax.core.request import FinishReason, RequestInput, SamplingParams
from ksana_jax.engine.changes import IdleChanges
from ksana_jax.engine.completion import Completion, Request
from ksana_jax.engine.engine_lock import EngineLock
from ksana_jax.engine.request_factory import RequestFactory
from ksana_jax.engine.scores import add_prompt_scores, advance_beams
from ksana_jax.engine.steps import Step
from ksana_jax.engine.watched import WatchedCompletion, add_tokens
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.executor import Executor
from ksana_jax.scheduler.step.types import ScheduledBatch
from ksana_jax.tokenizers import Tokenizer

if TYPE_CHECKING:
    from ksana_jax.runner.planner.engine import PoolPlan


T = TypeVar("T")


class Engine(IdleChanges):
    """Serves requests step by step; `engine.build.build_engine` makes one.

    Args:
      scheduler, builder, executor, config, clock: see `StepLoop`.
      model: what it was built from.
      memory_plan: how its pool was sized; None where it was not.
      tokenizer: makes text; None serves requests with detokenize=False only.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        executor: Executor,
        *,
        model: ModelConfig,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        memory_plan: PoolPlan | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(scheduler, builder, executor, config, clock)
        self.model, self.tokenizer, self.memory_plan = model, tokenizer, memory_plan
        # Model and load_format of the LLM that has read the weights; None if they were in memory.
        self.source: tuple[str, str] | None = None
        # See `engine.sleeping`: what it takes to wake up, None while awake; and what reads other weights.
        self.asleep: Any = None
        self.read_weights: Any = None
        # Programs that `engine.warmup` compiles while requests are served.
        self.num_compiling = 0
        self.max_model_len = scheduler.max_model_len
        self.factory = RequestFactory(scheduler, model, tokenizer, config.seed)
        self.requests: dict[str, Request] = {}
        # Requests whose first token the last step has sampled.
        self.first_tokens: list[Request] = []
        # Called after each step that computed something, its record written; they may look, not change anything.
        self.observers: list[Callable[[Engine], None]] = []
        # Completions that are read token by token, inspected, or score or pool prompts; a dict keeps their order.
        self._watched: dict[Completion, None] = {}
        # Runs every change of the engine, one at a time.
        self.lock = EngineLock(self._reset)

    def new_requests(self, asked: Seq[RequestInput]) -> list[Request]:
        """Creates requests, to be passed to `add`.

        Raises:
          ValueError: one of them can never be served; then none is made.
        """
        return self.factory.new_requests(asked, clock=self.clock, taken=self.requests)

    def new_request(self, prompt_token_ids: np.ndarray, params: SamplingParams, **settings: Any) -> Request:
        """Creates one request from the fields of `RequestInput`; see `new_requests`."""
        return self.new_requests([RequestInput(prompt_token_ids, params, **settings)])[0]

    def add_request(self, prompt_token_ids: np.ndarray, params: SamplingParams, **settings: Any) -> Request:
        """Creates and adds a request; see `new_request` and `add`."""
        request = self.new_request(prompt_token_ids, params, **settings)
        self.add([request])
        return request

    def add(self, requests: Collection[Request]) -> None:
        """Adds requests to the engine, all or none.

        Raises:
          ValueError: an id is taken. RuntimeError: the engine sleeps.
        """
        self.lock.run(self._add, requests)

    def _add(self, requests: Collection[Request]) -> None:
        if self.asleep is not None:
            raise RuntimeError("the engine sleeps: call wake_up() first")
        for request in requests:
            if request.request_id in self.requests:
                raise ValueError(f"request id {request.request_id!r} is in use")
        leaders = [next(iter(request.sequences)) for request in requests]
        for leader in leaders:
            self.scheduler.queue.rank(leader)
        self.lock.begin_write()
        if not self.scheduler.has_work:
            self._recorded_s = None
        for request, leader in zip(requests, leaders, strict=True):
            self.requests[request.request_id] = request
            for completion in request.completions:
                scores_prompt = completion.seq.params.prompt_logprobs is not None or completion.seq.pooling_type
                if scores_prompt or self.inspectors or isinstance(completion, WatchedCompletion):
                    self._watched[completion] = None
            self.scheduler.add(leader)

    def abort(self, request_id: str) -> None:
        """Ends a request in any state; unknown and finished requests are ignored."""
        if (request := self.requests.get(request_id)) is not None:
            self._abort_all([request])

    def _abort_all(self, requests: Collection[Request]) -> None:
        self.lock.run_or_defer(self._abort, requests)

    def _abort(self, requests: Collection[Request]) -> None:
        for request in requests:
            if self.requests.get(request.request_id) is request:
                self.lock.begin_write()
                self._end(request, FinishReason.ABORT)
                self._close(request)
                request.notify()

    def serve(
        self, requests: Seq[Request], report: Callable[[Request], RequestOutput] = Request.output
    ) -> Iterator[RequestOutput]:
        """Adds requests and computes until they have ended, together with all other requests in the engine.

        Several threads may do so at once: each step serves all of them, whichever thread computes it.

        Yields:
          `report(request)` whenever a request has something new: all so far, or with Request.take_delta what is new.

        Raises:
          RuntimeError: a failure in a step of another thread or stream has ended the requests.
          KeyboardInterrupt: Ctrl-C was pressed. Between steps, that aborts `requests`; within a step, whose pool may be
            lost, it ends all requests of the engine and drops its cached prefixes.
        """
        news: dict[Request, None] = {}
        for request in requests:
            request.news = news
        unfinished = {request.request_id for request in requests}
        try:
            try:
                self.add(requests)
                while unfinished:
                    outputs = self.lock.run(self._step, news, lambda request: report(request.checked()))
                    unfinished.difference_update(output.request_id for output in outputs if output.finished)
                    yield from outputs
                    self.lock.yield_lock()
            finally:
                self._abort_all(requests)
        finally:  # again: an interrupt may come before the first word of the line above
            self._abort_all(requests)

    def advance(
        self, news: dict[Request, None], report: Callable[[Request], RequestOutput] = Request.output
    ) -> list[RequestOutput]:
        """Computes a step unless one of the caller's requests already has something new; returns what is new.

        Args:
          news: the requests with something new, `Request.news` of each of the caller's; empty afterwards.
        """
        outputs = self.lock.run(self._step, news, report)
        self.lock.yield_lock()
        return outputs

    def step(self) -> list[Request]:
        """Computes and reports one step, or reports the next of several; returns requests with new text or an end."""
        return self.lock.run(self._step, None, lambda request: request)

    def _step(self, news: dict[Request, None] | None, report: Callable[[Request], T]) -> list[T]:
        """Computes a step unless `news` already has requests; returns the reports of those in it, and empties it. None:
        of all requests with something new."""
        reported: dict[Request, None] = {}
        if not news:
            self.lock.begin_write()
            if (step := self._next_step()) is None:
                self._wait()
            else:
                reported = self._finish(step)
        if news is None:
            news = reported
        found = [report(request) for request in news]
        news.clear()
        return found

    def _finish(self, step: Step) -> dict[Request, None]:
        """Waits for a step and reports it; returns the requests with something new, in order."""
        output, now = self._collect(step)
        self.memory.device.needed_by = None
        batch, rows = step.batch, self.scheduler.rows
        self.first_tokens = self._note_first_tokens(batch, now)
        # Before sequences leave their rows.
        watched = {c: c.seq.row for c in self._watched if c.seq.row is not None}
        if step.input.targets is not None or step.input.pools:
            add_prompt_scores(rows, step, output, watched)
        finished = self.scheduler.settle(batch, *step.of_rows(output))
        reported = add_tokens(self.scheduler, step, output, watched) if watched else {}
        for inspect in self.inspectors:
            inspect(step, watched)
        reported |= dict.fromkeys(seq.owner for seq in finished)
        if len(batch.beams):
            new_beam, fail = self.factory.new_beam, functools.partial(self._end, reason=FinishReason.ERROR)
            reported |= advance_beams(self.scheduler, batch, output, new_beam, fail)
        self._close_ended(reported, now)
        self._record(step, output, now)
        for observe in self.observers:
            observe(self)
        if not self.scheduler.has_work:
            self.make_moves()
        return reported

    def _note_first_tokens(self, batch: ScheduledBatch, now: float) -> list[Request]:
        """Records the times of requests' first tokens, and returns these requests; called between `Scheduler.advance`
        and `settle`."""
        rows, found = self.scheduler.rows, []
        if not np.count_nonzero(rows.num_known == rows.num_prompt):  # of all rows: cheaper than of some
            return found
        sampled = batch.sampled
        fresh = rows.num_known[sampled] == rows.num_prompt[sampled]
        if batch.gone:
            fresh &= batch.stay(sampled)
        for row in sampled[fresh]:
            seq = rows.seqs[row]
            assert seq is not None
            metrics = seq.owner.metrics
            if metrics.first_token_s is None:
                metrics.first_token_s = now
                metrics.num_cached_tokens = seq.kv.num_cached_tokens or 0
                metrics.prefix_report = seq.kv.prefix_report
                metrics.num_cached_keys, metrics.num_cached_states = seq.kv.reach or (None, None)
                found.append(seq.owner)
        return found

    def _close_ended(self, reported: dict[Request, None], now: float) -> None:
        for request in reported:
            for completion in request.completions:
                if completion.seq.finish_reason is not None:
                    completion.close()
            if request.finished:
                self._close(request, now)
            request.notify()

    def _reset(self, error: BaseException) -> None:
        """Ends all requests and rebuilds the state of rows, blocks and prefixes; files on disk stay."""
        for request in self.requests.values():
            request.fail(error)
        for state in (self.requests, self._watched, self._running, self._ahead):
            state.clear()
        self._recorded_s = None
        patterns = self.executor.patterns
        scope = self.memory.index.scope.seen_through(patterns)
        if self.asleep is None:
            self.executor.reset()
        host = self.executor.host_blocks, self.executor.host_states
        self.scheduler.reset(self.scheduler.layout.with_patterns(patterns), scope, *host)

    def _end(self, request: Request, reason: FinishReason) -> None:
        for seq in (*request.sequences, *(c.seq for c in request.completions)):
            self.scheduler.finish(seq, reason)

    def _close(self, request: Request, now: float | None = None) -> None:
        request.close(self.clock() if now is None else now)
        for completion in request.completions:
            self._watched.pop(completion, None)
        self.requests.pop(request.request_id, None)
