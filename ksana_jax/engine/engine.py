"""The loop: schedule, execute, update, report. Knows requests and their rows; no jax, no files, a clock handed in."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import numpy as np

from ksana_jax.batch import BatchBuilder
from ksana_jax.engine.beam import Beams, advance, num_candidates
from ksana_jax.engine.completion import Completion, Request, top_logprobs
from ksana_jax.kv.memory import KVMemory
from ksana_jax.metrics import StepRecord
from ksana_jax.request import FinishReason, RequestMetrics, SamplingParams
from ksana_jax.scheduler.scheduler import Progress, Scheduler
from ksana_jax.sequence import Sequence
from ksana_jax.step import Executor, Moves, ScheduledBatch, StepOutput
from ksana_jax.tokenizers import Tokenizer


class Engine:
    """Serves requests step by step.

    Args:
      scheduler: owns rows and blocks.
      builder: turns its batches into arrays.
      executor: computes them.
      tokenizer: makes text; None serves requests with detokenize=False only.
      eos_ids: end-of-sequence ids of the model.
      max_model_len: most tokens of a sequence, prompt included.
      seed: of requests that bring none.
      clock: seconds, rising.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        executor: Executor,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        max_model_len: int,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.scheduler, self.builder, self.executor = scheduler, builder, executor
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.max_model_len, self.seed, self.clock = max_model_len, seed, clock
        self.requests: dict[str, Request] = {}
        self.records: list[StepRecord] = []
        # Called after each step that computed something, its record written.
        self.observers: list[Callable[[Engine], None]] = []
        # Those whose text or log-probabilities are wanted step by step; a dict keeps the order of arrival.
        self._watched: dict[Completion, None] = {}
        self._num_requests = self._num_seqs = 0

    @property
    def memory(self) -> KVMemory:
        """Who knows where every block is."""
        return self.scheduler.memory

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def validate(self, prompt_token_ids: np.ndarray, params: SamplingParams) -> None:
        """Whether a request can be served.

        Raises:
          ValueError: it never can, with the numbers.
        """
        count, vocab = len(prompt_token_ids), self.builder.vocab_size
        if not count:
            raise ValueError("prompt is empty: at least one token is needed")
        if count >= self.max_model_len:
            raise ValueError(
                f"prompt has {count:,} tokens, max_model_len is {self.max_model_len:,} and leaves no token of output"
            )
        low, high = int(prompt_token_ids.min()), int(prompt_token_ids.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"prompt has token id {low if low < 0 else high}, ids go from 0 to {vocab - 1}")
        for name, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_token_ids or ())):
            if ids and max(ids) >= vocab:
                raise ValueError(f"{name} has token id {max(ids)}, ids go from 0 to {vocab - 1}")
        if self.tokenizer is None and params.detokenize:
            raise ValueError("this engine has no tokenizer: set detokenize=False")
        if params.beam_width > self.scheduler.max_num_seqs:
            raise ValueError(f"beam_width is {params.beam_width}, max_num_seqs is {self.scheduler.max_num_seqs}")
        max_len = min(count + params.max_tokens, self.max_model_len)
        needed, blocks = self.scheduler.blocks_to_finish(max_len), self.scheduler.blocks
        needed *= max(params.beam_width, 1)  # beams wait for each other: all of them must fit, even unshared
        if needed > blocks.num_blocks:
            raise ValueError(
                f"prompt of {count:,} tokens and max_tokens {params.max_tokens:,} need {needed:,} KV blocks of "
                f"{blocks.block_size} tokens, the pool has {blocks.num_blocks:,}"
            )

    def add_request(
        self,
        prompt_token_ids: np.ndarray,
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
        streams: bool = False,
    ) -> Request:
        """Takes a request in.

        Args:
          cache_salt: only requests of the same salt share cached prefixes.
          streams: its text is wanted while it grows; beams have none before the end.

        Raises:
          ValueError: it can never be served, or its id is taken; nothing is changed.
        """
        self.validate(prompt_token_ids, params)
        prompt_token_ids = prompt_token_ids.astype(np.int32)
        if request_id is None:
            request_id = f"request-{self._num_requests}"
            while request_id in self.requests:  # somebody chose a name like ours
                request_id += "'"
        if request_id in self.requests:
            raise ValueError(f"request id {request_id!r} is in use")
        request = Request(request_id, prompt, prompt_token_ids, params, RequestMetrics(self.clock()))
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        for index in range(params.n):
            seq = self._new_sequence(request, prompt_token_ids, index, cache_salt)
            given = self.tokenizer if params.detokenize else None
            completion = Completion(index, seq, given, streams and not params.beam_width)
            request.completions.append(completion)
            if completion.watched or seq.params.prompt_logprobs is not None:
                self._watched[completion] = None
        leader, *forks = [completion.seq for completion in request.completions]
        if params.beam_width:
            leader = self._new_beam(request, prompt_token_ids, cache_salt)
            request.beams = Beams(
                params.beam_width,
                params.length_penalty,
                leader.stop_ids,
                leader.max_len,
                leader.num_prompt,
                {leader: 0.0},
            )
        else:
            leader.forks = forks
        self.scheduler.add(leader)
        self._num_requests += 1
        self.requests[request_id] = request
        return request

    def _new_sequence(self, request: Request, token_ids: np.ndarray, index: int, salt: str) -> Sequence:
        params, count = request.params, len(request.prompt_token_ids)
        stop_ids = tuple(params.stop_token_ids or ()) + (() if params.ignore_eos else self.eos_ids)
        self._num_seqs += 1
        return Sequence(
            seq_id=self._num_seqs - 1,
            token_ids=token_ids,
            params=params if index == 0 else dataclasses.replace(params, prompt_logprobs=None),
            stop_ids=tuple(dict.fromkeys(stop_ids)),
            max_len=min(count + params.max_tokens, self.max_model_len),
            seed=self._seed(params, index),
            owner=request,
            request_id=request.request_id,
            index=index,
            salt=salt,
            num_blocks_by_origin=request.metrics.num_blocks_by_origin,
        )

    def _new_beam(self, request: Request, token_ids: np.ndarray, salt: str) -> Sequence:
        seq = self._new_sequence(request, token_ids, 0, salt)
        count = num_candidates(request.params.beam_width, seq.stop_ids)
        seq.params = SamplingParams(temperature=0, logprobs=count, max_tokens=request.params.max_tokens)
        seq.guided, seq.num_prompt, seq.index = True, len(request.prompt_token_ids), seq.seq_id
        return seq

    def _seed(self, params: SamplingParams, index: int) -> int:
        if params.seed is not None and index == 0:
            return params.seed & (2**64 - 1)
        parts = (self.seed & (2**64 - 1), self._num_requests) if params.seed is None else (params.seed & (2**64 - 1),)
        return int(np.random.SeedSequence((*parts, index)).generate_state(1, np.uint64)[0])

    def abort(self, request_id: str) -> None:
        """Ends a request in whatever state it is; unknown and finished ones are left alone."""
        request = self.requests.get(request_id)
        if request is None:
            return
        for seq in (*request.sequences, *(c.seq for c in request.completions)):
            self.scheduler.finish(seq, FinishReason.ABORT)
        self._close(request)

    def step(self) -> list[Request]:
        """Computes one step.

        Returns:
          Requests that have something new to report: a completion that ended, or text of one that streams.
        """
        batch = self.scheduler.schedule()
        if batch is None:
            waits = self.memory.loads.num_pending
            assert waits or not self.scheduler.has_work, "there is work, and none of it can be scheduled"
            if waits:
                self.memory.loads.wait()
            self._make_moves()
            return []
        step, ends = self.builder.build(batch, self.scheduler.rows)
        step.moves = self.memory.take_moves()
        peak_blocks = self.scheduler.blocks.num_used
        unshared_blocks = int(self.scheduler.rows.num_blocks[self.scheduler.order].sum())
        began = self.clock() if self.memory.weighs_costs else 0.0
        try:
            output = self.executor.execute(step)
        except BaseException:
            self._lose_device(step.moves)
            raise
        now = self.clock()
        self.memory.commit()
        if self.memory.weighs_costs:
            prefills = batch.num_tokens if len(batch.chunks) else 0
            self.memory.costs.observe(prefills, now - began, step.moves, output.move_s)
        self._note_first_tokens(batch, now)
        rows_of = {c: c.seq.row for c in self._watched if c.seq.row is not None}
        if step.targets is not None:
            self._report_prompt(batch, ends, step.arrays.last, output, rows_of)
        progress = self.scheduler.update(batch, output.tokens[ends])
        reported = self._report_tokens(batch, ends, output, progress, rows_of)
        for seq in progress.finished:
            reported.setdefault(seq.owner)
        if len(progress.guided):
            self._advance_beams(batch, ends, output, progress, reported)
        for request in reported:
            for completion in request.completions:
                if completion.seq.finish_reason is not None:
                    completion.close()
            if request.finished:
                self._close(request, now)
        self.records.append(
            StepRecord(
                now, batch.num_tokens, len(batch.singles), len(self.scheduler.order), len(self.scheduler.waiting),
                self.scheduler.blocks.num_used, peak_blocks, self.scheduler.num_preemptions, unshared_blocks,
                self.scheduler.blocks.num_idle,
            )
        )  # fmt: skip
        for observe in self.observers:
            observe(self)
        if not self.scheduler.has_work:
            self._make_moves()
        return list(reported)

    def flush(self) -> None:
        """Brings cached prefixes to the disk, where there is one; the engine must be idle."""
        assert not self.has_work
        self._make_moves()
        for _ in self.memory.flush():
            self._make_moves()

    def _make_moves(self) -> None:
        """Has the executor copy what waits for a step that does not come."""
        if (moves := self.memory.take_moves()) is not None:
            try:
                self.executor.move(moves)
            except BaseException:
                self._lose_device(moves)
                raise
            self.memory.commit()

    def _lose_device(self, moves: Moves | None) -> None:
        """After a failure: what was computed is lost, and nothing may stay behind that holds blocks."""
        for request_id in list(self.requests):
            self.abort(request_id)
        self.memory.lose_device(moves)

    def _note_first_tokens(self, batch: ScheduledBatch, now: float) -> None:
        rows = self.scheduler.rows
        fresh = rows.num_tokens[batch.rows] == rows.num_prompt[batch.rows]
        if not fresh.any():
            return
        whole = rows.num_computed[batch.rows] + batch.num_per_row == rows.num_tokens[batch.rows]
        for row in batch.rows[fresh & whole]:
            seq = rows.seqs[row]
            metrics = seq.owner.metrics
            if metrics.first_token_s is None:
                metrics.first_token_s = now
                metrics.num_cached_tokens = seq.num_cached_tokens or 0

    def _report_prompt(self, batch, ends, last, output: StepOutput, rows_of) -> None:
        """Adds the log-probabilities of the prompt tokens that this step has scored."""
        rows, scores = self.scheduler.rows, output.prompt_scores
        assert scores is not None, "the executor was given targets and returned no scores"
        where = {row: i for i, row in enumerate(batch.rows.tolist())}
        for completion, row in rows_of.items():
            seq, count = completion.seq, completion.seq.params.prompt_logprobs
            if count is None or row not in where:
                continue
            i = where[row]
            computed = int(batch.num_per_row[i])
            start = int(rows.num_computed[row])
            # The step scored prompt tokens start + 1 to start + computed; a restart scores some again.
            first, end = max(seq.num_scored, start + 1), min(start + computed, seq.num_prompt - 1)
            token = int(last[ends[i]]) + 1 - computed + (first - 1 - start)
            for offset in range(max(end + 1 - first, 0)):
                token_id = int(rows.token_ids[row, first + offset])
                seq.owner.prompt_logprobs.append(top_logprobs(scores, token + offset, token_id, count))
            seq.num_scored = max(seq.num_scored, end + 1)

    def _report_tokens(self, batch, ends, output: StepOutput, progress: Progress, rows_of) -> dict[Request, None]:
        """Hands new tokens to the completions that want them; returns their requests, in order."""
        reported: dict[Request, None] = {}
        if not rows_of:
            return reported
        tile_of = dict(zip(batch.rows.tolist(), ends.tolist(), strict=True))
        token_of = dict(zip(progress.rows.tolist(), progress.tokens.tolist(), strict=True))
        for completion, row in rows_of.items():
            if row not in token_of or not completion.watched:
                continue
            stop = completion.add(token_of[row], output.scores, tile_of[row])
            if stop is not None:
                self._stop_by_text(completion.seq, stop)
                reported.setdefault(completion.seq.owner)
            if completion.streams:
                reported.setdefault(completion.seq.owner)
        return reported

    def _advance_beams(self, batch, ends, output: StepOutput, progress: Progress, reported) -> None:
        """Hands what beams ask for to their requests, which choose how they go on."""
        tile_of = dict(zip(batch.rows.tolist(), ends.tolist(), strict=True))
        scores = output.scores
        assert scores is not None
        # Dropped beams leave their rows: who is where is asked before.
        for seq, row in [(self.scheduler.rows.seqs[row], row) for row in progress.guided.tolist()]:
            assert seq is not None
            request, tile = seq.owner, tile_of[row]
            top = slice(request.beams.num_candidates)
            if not request.beams.report(seq, scores.top_ids[tile, top], scores.top_logprobs[tile, top]):
                continue
            if not advance(request.beams, self.scheduler, functools.partial(self._new_beam, request, salt=seq.salt)):
                self._finish_beams(request, request.beams)
                reported.setdefault(request)

    def _finish_beams(self, request: Request, beams: Beams) -> None:
        """Makes completions of the best beams."""
        for completion, best in zip(request.completions, beams.finished, strict=False):
            seq = completion.seq
            seq.token_ids = np.append(seq.token_ids, np.array(best.token_ids, np.int32))
            seq.finish_reason, seq.stop_reason = best.finish_reason, best.stop_reason
            completion.cumulative_logprob = best.logprob

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
