"""The engine loop: schedule, submit, advance, settle, report. Knows requests and rows; no jax, no files."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.metrics import StepRecord
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.core.request import FinishReason, RequestInput, RequestOutput, SamplingParams
from ksana_jax.engine import steps
from ksana_jax.engine.completion import Completion, Request
from ksana_jax.engine.engine_lock import EngineLock
from ksana_jax.engine.request_factory import RequestFactory
from ksana_jax.engine.steps import Step, Steps, schedule_after, submit
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.memory import KVMemory
from ksana_jax.scheduler.running import StepResult
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.types import Executor, ScheduledBatch, StepOutput
from ksana_jax.tokenizers import Tokenizer

if TYPE_CHECKING:
    from ksana_jax.runner.planner.engine import PoolPlan


T = TypeVar("T")


class Engine:
    """Serves requests step by step; `engine.build.build_engine` makes one.

    Args:
      scheduler: owns rows and blocks.
      builder: turns its batches into arrays.
      executor: computes them.
      model, config: what it was built from.
      memory_plan: how its pool was sized; None where it was not.
      tokenizer: makes text; None serves requests with detokenize=False only.
      clock: seconds, rising.
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
        self.scheduler, self.builder, self.executor = scheduler, builder, executor
        self.model, self.config, self.tokenizer, self.clock = model, config, tokenizer, clock
        self.memory_plan = memory_plan
        # Model and load_format of the LLM that has read the weights; None if they were in memory.
        self.source: tuple[str, str] | None = None
        # See `engine.sleeping`: what it takes to wake up, None while awake; and what reads other weights.
        self.asleep: Any = None
        self.read_weights: Any = None
        self.max_model_len = scheduler.max_model_len
        self.factory = RequestFactory(scheduler, model, tokenizer, config.seed)
        self.requests: dict[str, Request] = {}
        self.records: list[StepRecord] = []
        # Requests whose first token the last step has sampled.
        self.first_tokens: list[Request] = []
        # Called after each step that computed something, its record written; they may look, not change anything.
        self.observers: list[Callable[[Engine], None]] = []
        # Requests whose text or log-probabilities are wanted step by step; a dict keeps the order of arrival.
        self._watched: dict[Completion, None] = {}
        # Steps of the call that is being reported, and of the call after it.
        self._running: Steps = collections.deque()
        self._ahead: Steps = collections.deque()
        # When the last step was reported; None if the engine has been idle since.
        self._reported_s: float | None = None
        # On the host an embedding is looked up before the step, for which its tokens must be known.
        feeds = config.embedding_device == "device"
        self.runs_ahead = config.async_scheduling and feeds
        self._most_steps = config.num_scheduler_steps if feeds else 1
        # Runs every change of the engine, one at a time.
        self.lock = EngineLock(self._reset)

    @property
    def memory(self) -> KVMemory:
        """The KV memory, which knows where every block is."""
        return self.scheduler.memory

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def new_requests(self, asked: Seq[RequestInput]) -> list[Request]:
        """Creates requests, to be passed to `add`.

        Raises:
          ValueError: one of them can never be served; then none is made.
        """
        return self.factory.new_requests(asked, clock=self.clock, taken=self.requests)

    def new_request(self, prompt_token_ids: np.ndarray, params: SamplingParams, **settings: Any) -> Request:
        """Creates one request from the fields of `RequestInput`; see `new_requests`."""
        [request] = self.new_requests([RequestInput(prompt_token_ids, params, **settings)])
        return request

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
            self._reported_s = None
        for request, leader in zip(requests, leaders, strict=True):
            self.requests[request.request_id] = request
            for completion in request.completions:
                if completion.watched or completion.seq.params.prompt_logprobs is not None:
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

    @property
    def num_steps_under_way(self) -> int:
        """Number of steps that are submitted and not yet reported."""
        return len(self._running) + len(self._ahead)

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

    def _next_step(self) -> Step | None:
        """Returns the next step that is submitted, and submits those after it; None if nothing can be computed."""
        if not self._running:
            since = self.clock() if self._reported_s is None else self._reported_s
            if not self._ahead:
                self._ahead = self._submit(self.scheduler.schedule(), since)
                if not self._ahead:
                    return None
                since = self._ahead[-1].began
            self._running, self._ahead = self._ahead, collections.deque()
            self.scheduler.advance(self._running[-1].batch)
            if self.runs_ahead:
                self._ahead = self._submit(schedule_after(self._running[-1], self.scheduler), since)
        return self._running.popleft()

    def _finish(self, step: Step) -> dict[Request, None]:
        """Waits for a step and reports it; returns the requests with something new, in order."""
        output, now = self._collect(step)
        watched = self._report_prompts(step, output, now)
        result = self.scheduler.settle(step.batch, *step.of_rows(output))
        reported = self._report(step, output, result, watched)
        self._close_ended(reported, now)
        self._observe(step, output, result, now)
        return reported

    def _wait(self) -> None:
        """Waits for the disk when nothing can be computed."""
        reads = self.memory.disk_reads
        if reads is not None and reads.num_pending:
            reads.wait()
        elif self.scheduler.has_work:
            raise RuntimeError("there is work, and none of it can be scheduled")
        self.make_moves()

    def _submit(self, batch: ScheduledBatch | None, since: float) -> Steps:
        submitted = submit(batch, self.scheduler, self.builder, self.executor, self._most_steps, self.clock, since)
        if batch is not None and batch.admitted:  # later steps of the same call admit no request
            steps.note_scheduled(self.scheduler.rows, batch.admitted, submitted[0].began)
        return submitted

    def _collect(self, step: Step) -> tuple[StepOutput, float]:
        """Waits for a step; returns its output and the time."""
        assert step.pending is not None
        output = step.pending.result()
        now = self.clock()
        self.memory.commit()
        steps.note_costs(self.scheduler, step, output, now)
        return output, now

    def _report_prompts(self, step: Step, output: StepOutput, now: float) -> dict[Completion, int]:
        """Records first tokens and prompt scores; returns the rows of watched completions, before they leave."""
        rows = self.scheduler.rows
        self.first_tokens = steps.note_first_tokens(rows, step.batch, now)
        watched = {c: c.seq.row for c in self._watched if c.seq.row is not None}
        if step.input.targets is not None:
            steps.add_prompt_scores(rows, step, output, watched)
        return watched

    def _report(self, step: Step, output: StepOutput, result: StepResult, watched) -> dict[Request, None]:
        """Adds new tokens to their requests; returns the requests with something new, in order."""
        reported = steps.add_tokens(self.scheduler, step, output, result, watched)
        for seq in result.finished:
            reported.setdefault(seq.owner)
        if len(result.beams):
            new_beam, fail = self.factory.new_beam, functools.partial(self._end, reason=FinishReason.ERROR)
            reported |= steps.advance_beams(self.scheduler, step.batch, output, result, new_beam, fail)
        return reported

    def _close_ended(self, reported: dict[Request, None], now: float) -> None:
        for request in reported:
            for completion in request.completions:
                if completion.seq.finish_reason is not None:
                    completion.close()
            if request.finished:
                self._close(request, now)
            request.notify()

    def _observe(self, step: Step, output: StepOutput, result: StepResult, ended_s: float) -> None:
        now = self.clock()
        self.records.append(steps.record(self.scheduler, step, output, result, ended_s, now, self._most_steps))
        self._reported_s = now
        for observe in self.observers:
            observe(self)
        if not self.scheduler.has_work:
            self.make_moves()

    def set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        """Changes the attention pattern of each layer.

        Raises:
          RuntimeError: requests are running.
          ValueError: the executor cannot serve these patterns.
        """
        self.lock.run(self._set_patterns, patterns)

    def _set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        self.check_idle("the pattern changes only in between")
        layout = self.scheduler.layout.with_patterns(patterns)  # may refuse, which changes nothing
        self.lock.begin_write()
        self.executor.set_patterns(patterns)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.proposer.set_patterns(patterns)
        self.scheduler.set_layout(layout, self.memory.index.scope.seen_through(patterns))

    def set_eviction(self, method: EvictionMethod) -> None:
        """Changes the numbers of the eviction method.

        Raises:
          RuntimeError: requests are running.
          ConfigError: see `KVLayout.with_eviction`.
        """
        self.lock.run(self._set_eviction, method)

    def _set_eviction(self, method: EvictionMethod) -> None:
        self.check_idle("the eviction method changes only in between")
        layout = self.scheduler.layout.with_eviction(method.encoded(self.tokenizer))
        self.lock.begin_write()
        self.builder = dataclasses.replace(self.builder, numbers=layout.numbers_queries)
        self.scheduler.set_layout(layout)

    def check_idle(self, otherwise: str) -> None:
        if self.has_work:
            raise RuntimeError(f"{len(self.requests)} requests are running: {otherwise}")

    def _reset(self, error: BaseException) -> None:
        """Ends all requests and rebuilds the state of rows, blocks and prefixes; files on disk stay."""
        for request in self.requests.values():
            request.fail(error)
        self.requests.clear()
        self._watched.clear()
        self._running.clear()
        self._ahead.clear()
        self._reported_s = None
        patterns = self.executor.patterns
        scope = self.memory.index.scope.seen_through(patterns)
        if self.asleep is None:
            self.executor.reset()
        self.scheduler.reset(self.scheduler.layout.with_patterns(patterns), scope, self.executor.host_blocks)

    def flush(self) -> None:
        """Writes cached prefixes to disk, if there is a disk tier; raises RuntimeError while requests are running."""
        self.lock.run(self._flush)

    def _flush(self) -> None:
        self.check_idle("prefixes are written to the disk only in between")
        self.lock.begin_write()
        self.make_moves()
        for _ in self.memory.flush():
            self.make_moves()

    def make_moves(self) -> None:
        """Runs pending block moves when no step is coming to carry them."""
        if (moves := self.memory.take_moves()) is not None:
            self.executor.move(moves)
            self.memory.commit()

    def _end(self, request: Request, reason: FinishReason) -> None:
        for seq in (*request.sequences, *(c.seq for c in request.completions)):
            self.scheduler.finish(seq, reason)

    def _close(self, request: Request, now: float | None = None) -> None:
        request.close(self.clock() if now is None else now)
        for completion in request.completions:
            self._watched.pop(completion, None)
        self.requests.pop(request.request_id, None)
