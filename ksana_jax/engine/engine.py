"""The loop: schedule, execute, update, report. Knows requests and their rows; no jax, no files, a clock handed in."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from ksana_jax import interrupts
from ksana_jax.config import EngineConfig, ModelConfig
from ksana_jax.engine import report
from ksana_jax.engine.beam import Beams, advance, num_candidates
from ksana_jax.engine.changes import Changes
from ksana_jax.engine.completion import Completion, Request
from ksana_jax.engine.intake import bad_word_ids, check_request, seed_of
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.state import KVState
from ksana_jax.metrics import StepRecord
from ksana_jax.patterns import AttentionPattern
from ksana_jax.request import FinishReason, RequestMetrics, RequestOutput, SamplingParams
from ksana_jax.scheduler.progress import Progress
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.sequence import Sequence
from ksana_jax.step.builder import BatchBuilder
from ksana_jax.step.contract import Executor, StepOutput
from ksana_jax.tokenizers import Tokenizer


class Engine:
    """Serves requests step by step; `engine.build.build_engine` makes one.

    Args:
      scheduler: owns rows and blocks.
      builder: turns its batches into arrays.
      executor: computes them.
      model, config: what it was built from.
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
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.scheduler, self.builder, self.executor = scheduler, builder, executor
        self.model, self.config, self.tokenizer, self.clock = model, config, tokenizer, clock
        self.eos_ids, self.max_model_len = model.eos_ids, scheduler.max_model_len
        self.requests: dict[str, Request] = {}
        self.records: list[StepRecord] = []
        # Called after each step that computed something, its record written; they may look, not change anything.
        self.observers: list[Callable[[Engine], None]] = []
        # Those whose text or log-probabilities are wanted step by step; a dict keeps the order of arrival.
        self._watched: dict[Completion, None] = {}
        self._request_numbers, self._seq_ids = itertools.count(), itertools.count()
        self._changes = Changes(self._reset)

    @property
    def memory(self) -> KVMemory:
        """Where every block is."""
        return self.scheduler.memory

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def validate(self, prompt_token_ids: np.ndarray, params: SamplingParams) -> None:
        """Raises ValueError if a request can never be served; see `check_request`."""
        check_request(
            prompt_token_ids, params, self.scheduler, vocab_size=self.model.vocab_size,
            max_model_len=self.max_model_len, tokenizer=self.tokenizer, eos_ids=self.eos_ids,
        )  # fmt: skip

    def new_request(
        self,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
        streams: bool = False,
    ) -> Request:
        """Makes a request, for `add`.

        Args:
          cache_salt: only requests of the same salt share cached prefixes.
          streams: its text is wanted while it grows; beams have none before the end.

        Raises:
          ValueError: it can never be served.
        """
        self.validate(prompt_token_ids, params)
        prompt_token_ids, number = prompt_token_ids.astype(np.int32), next(self._request_numbers)
        if request_id is None:
            request_id = f"request-{number}"
            while request_id in self.requests:  # a user chose a name like ours
                request_id += "'"
        request = Request(request_id, prompt, prompt_token_ids, params, RequestMetrics(self.clock()))
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        for index in range(params.n):
            seed = seed_of(params, index, self.config.seed, number)
            seq = self._new_sequence(request, prompt_token_ids, index, cache_salt, seed)
            given = self.tokenizer if params.detokenize else None
            completion = Completion(index, seq, given, streams and not params.beam_width)
            request.completions.append(completion)
        if params.beam_width:
            leader = self._new_beam(request, prompt_token_ids, cache_salt)
            width, penalty, stop_ids = params.beam_width, params.length_penalty, leader.stop_ids
            request.beams = Beams(width, penalty, stop_ids, leader.max_len, leader.num_prompt, {leader: 0.0})
        else:
            leader, *leader.forks = [completion.seq for completion in request.completions]
        return request

    def add_request(self, prompt_token_ids: np.ndarray, params: SamplingParams, **settings: Any) -> Request:
        """Makes a request and takes it in; see `new_request` and `add`."""
        request = self.new_request(prompt_token_ids, params, **settings)
        self.add([request])
        return request

    def add(self, requests: Collection[Request]) -> None:
        """Takes requests in, all or none.

        Raises:
          ValueError: an id is taken.
        """
        self._changes.run(self._add, requests)

    def _add(self, requests: Collection[Request]) -> None:
        for request in requests:
            if request.request_id in self.requests:
                raise ValueError(f"request id {request.request_id!r} is in use")
        leaders = [next(iter(request.sequences)) for request in requests]
        for leader in leaders:
            self.scheduler.rank(leader)
        self._changes.begin()
        for request, leader in zip(requests, leaders, strict=True):
            self.requests[request.request_id] = request
            for completion in request.completions:
                if completion.watched or completion.seq.params.prompt_logprobs is not None:
                    self._watched[completion] = None
            self.scheduler.add(leader)

    def _new_sequence(self, request: Request, token_ids: np.ndarray, index: int, salt: str, seed: int = 0) -> Sequence:
        params, count = request.params, len(request.prompt_token_ids)
        stop_ids = tuple(params.stop_token_ids or ()) + (() if params.ignore_eos else self.eos_ids)
        return Sequence(
            seq_id=next(self._seq_ids),
            token_ids=token_ids,
            params=params if index == 0 else dataclasses.replace(params, prompt_logprobs=None),
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            max_len=params.max_len(count, self.max_model_len),
            seed=seed,
            owner=request,
            request_id=request.request_id,
            index=index,
            bad_words=bad_word_ids(params.bad_words, self.tokenizer),
            kv=KVState(salt, request.metrics.num_blocks_by_origin),
        )

    def _new_beam(self, request: Request, token_ids: np.ndarray, salt: str) -> Sequence:
        seq = self._new_sequence(request, token_ids, 0, salt)
        count = num_candidates(request.params.beam_width, seq.stop_ids)
        seq.params = SamplingParams(temperature=0, logprobs=count, max_tokens=request.params.max_tokens)
        seq.guided, seq.num_prompt, seq.index = True, len(request.prompt_token_ids), seq.seq_id
        return seq

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and finished ones are left alone."""
        if (request := self.requests.get(request_id)) is not None:
            self._abort_all([request])

    def _abort_all(self, requests: Collection[Request]) -> None:
        if self._changes.running_here:  # Python collects a stream that was dropped, in the middle of a step
            self._changes.defer(functools.partial(self._abort, requests))
        else:
            self._changes.run(self._abort, requests)

    def _abort(self, requests: Collection[Request]) -> None:
        for request in requests:
            if self.requests.get(request.request_id) is request:
                self._changes.begin()
                self._end(request, FinishReason.ABORT)
                self._close(request)
                request.notify()

    def serve(self, requests: Seq[Request]) -> Iterator[RequestOutput]:
        """Takes requests in and computes until they have ended, together with all others that are in the engine.

        Several threads may do so at once: each step serves all of them, whichever thread computes it.

        Yields:
          What a request has so far, whenever there is something new to report.

        Raises:
          RuntimeError: what went wrong in a step of another thread or stream has ended the requests.
          KeyboardInterrupt: Ctrl-C was pressed; in the main thread, and between steps unless it was pressed twice.
        """
        news: dict[Request, None] = {}
        for request in requests:
            request.news = news
        unfinished = {request.request_id for request in requests}
        try:
            try:
                self.add(requests)
                while unfinished:
                    outputs = interrupts.defer(self._changes.run, self._advance, news)
                    unfinished.difference_update(output.request_id for output in outputs if output.finished)
                    yield from outputs
                    self._changes.give_way()
            finally:
                self._abort_all(requests)
        finally:  # again: an interrupt may come before the first word of the line above
            self._abort_all(requests)

    def _advance(self, news: dict[Request, None]) -> list[RequestOutput]:
        """Computes a step unless there is news without it."""
        if not news:
            self._step()
        for request in news:
            if request.failure is not None:
                raise RuntimeError(
                    f"the request was ended by what went wrong in a step of another: {request.completions[0].error}"
                ) from request.failure
        outputs = [request.output() for request in news]
        news.clear()
        return outputs

    def step(self) -> list[Request]:
        """Computes one step; returns requests with something new: a completion that ended, text of one that streams."""
        return self._changes.run(self._step)

    def _step(self) -> list[Request]:
        self._changes.begin()
        batch = self.scheduler.schedule()
        if batch is None:
            if self.memory.disk_reads.num_pending:
                self.memory.disk_reads.wait()
            elif self.scheduler.has_work:
                raise RuntimeError("there is work, and none of it can be scheduled")
            self._make_moves()
            return []
        step, ends = self.builder.build(batch, self.scheduler.rows)
        step.moves = self.memory.take_moves()
        peak_blocks = self.scheduler.blocks.num_used
        unshared_blocks = int(self.scheduler.rows.num_blocks[:, self.scheduler.order].sum())
        began = self.clock() if self.memory.swap.weighs_costs else 0.0
        output = self.executor.execute(step)
        now = self.clock()
        self.memory.commit()
        if self.memory.swap.weighs_costs:
            prefills = batch.num_tokens if len(batch.chunks) else 0
            self.memory.costs.observe(prefills, now - began, step.moves, output.move_s)
        report.note_first_tokens(self.scheduler.rows, batch, now)
        rows_of = {c: c.seq.row for c in self._watched if c.seq.row is not None}
        if step.targets is not None:
            report.add_prompt_scores(self.scheduler.rows, batch, ends, output, rows_of)
        progress = self.scheduler.update(batch, output.tokens[: np.count_nonzero(batch.samples)])
        reported = self._report_tokens(batch, output, progress, rows_of)
        for seq in progress.finished:
            reported.setdefault(seq.owner)
        if len(progress.guided):
            self._advance_beams(batch, output, progress, reported)
        for request in reported:
            for completion in request.completions:
                if completion.seq.finish_reason is not None:
                    completion.close()
            if request.finished:
                self._close(request, now)
            request.notify()
        self.records.append(report.record(self.scheduler, batch, now, peak_blocks, unshared_blocks))
        for observe in self.observers:
            observe(self)
        if not self.scheduler.has_work:
            self._make_moves()
        return list(reported)

    def set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        """Changes what each layer attends to.

        Raises:
          RuntimeError: requests are running.
          ValueError: the executor cannot serve these patterns.
        """
        self._changes.run(self._set_patterns, patterns)

    def _set_patterns(self, patterns: Seq[AttentionPattern]) -> None:
        self._check_idle("the pattern changes only in between")
        self._changes.begin()
        self.executor.set_patterns(patterns)
        layout = self.scheduler.layout.with_patterns(patterns)
        self.scheduler.set_layout(layout, self.memory.index.scope.seen_through(patterns))

    def _check_idle(self, otherwise: str) -> None:
        if self.has_work:
            raise RuntimeError(f"{len(self.requests)} requests are running: {otherwise}")

    def _reset(self, error: BaseException) -> None:
        """Ends all requests and makes the books of rows, blocks and prefixes again; files on the disk stay."""
        for request in self.requests.values():
            request.fail(error)
        self.requests.clear()
        self._watched.clear()
        patterns = self.executor.patterns
        scope = self.memory.index.scope.seen_through(patterns)
        self.executor.reset()
        self.scheduler.reset(self.scheduler.layout.with_patterns(patterns), scope, self.executor.host_blocks)

    def flush(self) -> None:
        """Brings cached prefixes to the disk, where there is one; raises RuntimeError while requests are running."""
        self._changes.run(self._flush)

    def _flush(self) -> None:
        self._check_idle("prefixes are written to the disk only in between")
        self._changes.begin()
        self._make_moves()
        for _ in self.memory.flush():
            self._make_moves()

    def _make_moves(self) -> None:
        """Runs pending block moves when no step is coming to carry them."""
        if (moves := self.memory.take_moves()) is not None:
            self.executor.move(moves)
            self.memory.commit()

    def _report_tokens(self, batch, output: StepOutput, progress: Progress, rows_of) -> dict[Request, None]:
        """Hands new tokens to the completions that want them; returns their requests, in order."""
        reported: dict[Request, None] = {}
        if not rows_of:
            return reported
        place_of = {row: place for place, row in enumerate(batch.sampled.tolist())}
        token_of = dict(zip(progress.rows.tolist(), progress.tokens.tolist(), strict=True))
        for completion, row in rows_of.items():
            if row not in token_of or not completion.watched:
                continue
            stop = completion.add(token_of[row], output.scores, place_of[row])
            if stop is not None:
                self._stop_by_text(completion.seq, stop)
                reported.setdefault(completion.seq.owner)
            if completion.streams:
                reported.setdefault(completion.seq.owner)
        return reported

    def _advance_beams(self, batch, output: StepOutput, progress: Progress, reported) -> None:
        """Hands what beams ask for to their requests, which choose how they go on."""
        place_of = {row: place for place, row in enumerate(batch.sampled.tolist())}
        scores = output.scores
        assert scores is not None
        # Dropped beams leave their rows: who is where is asked before.
        for seq, row in [(self.scheduler.rows.seqs[row], row) for row in progress.guided.tolist()]:
            assert seq is not None
            request, place = seq.owner, place_of[row]
            if output.tokens[place] < 0:
                self._end(request, FinishReason.ERROR)
                reported.setdefault(request)
            if request.finished:
                continue
            top = slice(request.beams.num_candidates)
            if not request.beams.report(seq, scores.top_ids[place, top], scores.top_logprobs[place, top]):
                continue
            if not advance(request.beams, self.scheduler, functools.partial(self._new_beam, request, salt=seq.kv.salt)):
                report.finish_beams(request)
                reported.setdefault(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        for seq in (*request.sequences, *(c.seq for c in request.completions)):
            self.scheduler.finish(seq, reason)

    def _stop_by_text(self, seq: Sequence, stop: str) -> None:
        if seq.finish_reason is FinishReason.LENGTH:  # by the same token
            seq.finish_reason, seq.stop_reason = FinishReason.STOP, stop
        self.scheduler.finish(seq, FinishReason.STOP, stop)

    def _close(self, request: Request, now: float | None = None) -> None:
        for completion in request.completions:
            completion.close()
            self._watched.pop(completion, None)
        metrics = request.metrics
        metrics.finished_s = self.clock() if now is None else now
        lengths = [len(c.seq.token_ids) - c.seq.num_prompt for c in request.completions]
        metrics.num_output_tokens, metrics.longest_output = sum(lengths), max(lengths)
        metrics.num_preemptions = sum(seq.num_preemptions for seq in request.sequences)
        if request.beams is not None:
            metrics.num_preemptions += request.beams.num_preemptions
        self.requests.pop(request.request_id, None)
