"""Steps of the engine: their submission, one or several in a call, and their report to requests. No jax, no files."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np

from ksana_jax.core.metrics import StepRecord
from ksana_jax.core.request import FinishReason
from ksana_jax.engine.beam import advance
from ksana_jax.engine.completion import Completion, Request, top_logprobs
from ksana_jax.scheduler.running import StepResult
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.sequence import Rows, Sequence
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.types import Executor, Pending, ScheduledBatch, StepInput, StepOutput, share_a_call


@dataclasses.dataclass(eq=False)
class Step:
    """A step that is built, and the state of the pool when it was.

    ends: for each of `batch.rows` the index of its last token among the step's.
    began, schedule_s: see `StepRecord`.
    blocks_after: blocks in use when the step after it was scheduled; None if that waits for this one's tokens.
    pending: once it is submitted.
    """

    batch: ScheduledBatch
    input: StepInput
    ends: np.ndarray
    began: float
    schedule_s: float
    peak_blocks: int
    unshared_blocks: int
    blocks_after: int | None = None
    pending: Pending | None = None

    @property
    def tile(self) -> int:
        """Sampled tokens of each row: several with drafts."""
        return 1 if self.input.drafts is None else self.input.shape.parts[0].width

    def of_rows(self, output: StepOutput) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns an output without padding: tokens [n], with drafts [n, tile], and how many drafts are accepted; and
        writes into the batch's drafts what was sampled after them."""
        count = len(self.batch.sampled)
        if self.input.drafts is None:
            return output.tokens[:count], None
        assert output.num_accepted is not None, "the executor was given drafts and does not say which it accepts"
        assert self.batch.drafts is not None
        sampled = output.tokens if output.sampled is None else output.sampled
        self.batch.drafts = self.batch.drafts._replace(sampled=sampled.reshape(-1, self.tile)[:count])
        return output.tokens.reshape(-1, self.tile)[:count], output.num_accepted[:count]


# Steps in the order of their submission.
Steps = collections.deque[Step]


def submit(
    batch: ScheduledBatch | None,
    scheduler: Scheduler,
    builder: BatchBuilder,
    executor: Executor,
    most_steps: int,
    clock: Callable[[], float],
    since: float,
) -> Steps:
    """Submits a step, if there is one, and those that follow in the same call: decodes, while no request waits.

    Args:
      most_steps: of a call. Fewer, or steps that differ, are submitted one by one.
      since: when the host began to schedule the step.
    """
    steps: Steps = collections.deque()
    while batch is not None:
        steps.append(_build(batch, scheduler, builder, clock, since))
        since = steps[-1].began
        if len(steps) == most_steps or len(batch.chunks) or scheduler.waiting:
            break
        batch = schedule_after(steps[-1], scheduler)
    inputs = [step.input for step in steps]
    if len(inputs) == most_steps > 1 and share_a_call(inputs):
        pending = executor.submit_together(inputs)
    else:
        pending = [executor.submit(given) for given in inputs]
    for step, result in zip(steps, pending, strict=True):
        step.pending = result
    return steps


def schedule_after(step: Step, scheduler: Scheduler) -> ScheduledBatch | None:
    """Schedules the step after the last one submitted or built, whose tokens are not known yet; None if it has to wait
    for them, or there is none."""
    scheduler.advance(step.batch)
    blocks_after = scheduler.blocks.num_used
    if (batch := scheduler.schedule_ahead(step.batch)) is not None:
        step.blocks_after = blocks_after
    return batch


def _build(
    batch: ScheduledBatch, scheduler: Scheduler, builder: BatchBuilder, clock: Callable[[], float], since: float
) -> Step:
    given, ends = builder.build(batch, scheduler.rows)
    given.moves = scheduler.memory.take_moves()
    peak_blocks = scheduler.blocks.num_used
    began = clock()
    return Step(batch, given, ends, began, began - since, peak_blocks, scheduler.row_blocks.num_held)


def note_scheduled(rows: Rows, admitted: Iterable[int], now: float) -> None:
    """Records when requests are scheduled for the first time; now: when the step began."""
    for row in admitted:
        seq = rows.seqs[row]
        assert seq is not None
        if seq.owner.metrics.scheduled_s is None:
            seq.owner.metrics.scheduled_s = now


def note_costs(scheduler: Scheduler, step: Step, output: StepOutput, now: float) -> None:
    """Reports a step's seconds to the choices that use measured times.

    Args:
      now: when its output came.
    """
    memory = scheduler.memory
    if scheduler.speculation is not None:
        shape = None if output.compiled or len(step.batch.chunks) else step.input.shape
        scheduler.speculation.observe_step(shape, step.began - step.schedule_s, now)
    if memory.swap is not None and memory.swap.weighs_costs:
        prefills = step.batch.num_tokens if len(step.batch.chunks) else 0
        memory.costs.observe(prefills, now - step.began, step.input.moves, output.move_s)


def note_first_tokens(rows: Rows, batch: ScheduledBatch, now: float) -> list[Request]:
    """Records the times of requests' first tokens, and returns these requests; called between `Scheduler.advance` and
    `settle`."""
    found: list[Request] = []
    if not np.count_nonzero(rows.num_known == rows.num_prompt):  # of all rows: cheaper than of some
        return found
    sampled = batch.sampled
    fresh = rows.num_known[sampled] == rows.num_prompt[sampled]
    if batch.gone:
        fresh &= batch.stay(sampled)
    if not np.count_nonzero(fresh):
        return found
    for row in sampled[fresh]:
        seq = rows.seqs[row]
        assert seq is not None
        metrics = seq.owner.metrics
        if metrics.first_token_s is None:
            metrics.first_token_s = now
            metrics.num_cached_tokens = seq.kv.num_cached_tokens or 0
            found.append(seq.owner)
    return found


def add_prompt_scores(
    rows: Rows,
    step: Step,
    output: StepOutput,
    rows_of: dict[Completion, int],
) -> None:
    """Adds the log-probabilities of the prompt tokens scored by this step; called before `Scheduler.settle`.

    Args:
      rows_of: row of each completion that wants them.
    """
    scores, batch = output.prompt_scores, step.batch
    assert scores is not None, "the executor was given targets and returned no scores"
    where = {row: i for i, row in enumerate(batch.rows.tolist()) if row not in batch.gone}
    for completion, row in rows_of.items():
        seq, count = completion.seq, completion.seq.params.prompt_logprobs
        if count is None or row not in where or row in rows.probes:
            continue
        i = where[row]
        computed = int(batch.num_per_row[i])
        last = step.ends[i]
        start = int(step.input.arrays.positions[last]) + 1 - computed
        # The step scored prompt tokens start + 1 to start + computed; after a preemption, some are scored again.
        first, end = max(seq.num_scored, start + 1), min(start + computed, seq.num_prompt - 1)
        token = int(last) + 1 - computed + (first - 1 - start)
        for offset in range(max(end + 1 - first, 0)):
            token_id = int(rows.token_ids[row, first + offset])
            seq.owner.prompt_logprobs.append(top_logprobs(scores, token + offset, token_id, count))
        seq.num_scored = max(seq.num_scored, end + 1)


def add_tokens(
    scheduler: Scheduler,
    step: Step,
    output: StepOutput,
    result: StepResult,
    rows_of: dict[Completion, int],
) -> dict[Request, None]:
    """Adds new tokens to the completions that want them; returns their requests, in order.

    Args:
      rows_of: row of each completion that wants them. A stop string in its text ends it, and drops the rest of its run.
    """
    reported: dict[Request, None] = {}
    if not rows_of:
        return reported
    place_of = {row: place * step.tile for place, row in enumerate(step.batch.sampled.tolist())}
    nth_of = {row: nth for nth, row in enumerate(result.rows.tolist())}
    for completion, row in rows_of.items():
        if (nth := nth_of.get(row)) is None or not completion.watched:
            continue
        run = result.run(nth)
        by_id = completion.seq.finish_reason is FinishReason.STOP
        for at, token in enumerate(run, 1):
            # An id that ends the output has no text.
            stop = completion.add(token, output.scores, place_of[row] + at - 1, has_text=not by_id or at < len(run))
            if stop is not None:
                result.shorten(nth, at)
                _stop_by_text(scheduler, completion, stop)
                reported.setdefault(completion.seq.owner)
                break
        if completion.streams and run:
            reported.setdefault(completion.seq.owner)
    return reported


def _stop_by_text(scheduler: Scheduler, completion: Completion, stop: str) -> None:
    seq = completion.seq
    length = seq.num_prompt + len(completion.token_ids)
    if seq.row is not None:
        scheduler.rows.drop_after(seq.row, length)
        scheduler.finish(seq, FinishReason.STOP, stop)
    else:  # ended by the same token, or by one that comes later in a run of draft tokens
        seq.token_ids = seq.token_ids[:length]
        seq.finish_reason, seq.stop_reason = FinishReason.STOP, stop


def advance_beams(
    scheduler: Scheduler,
    batch: ScheduledBatch,
    output: StepOutput,
    result: StepResult,
    new_beam: Callable[..., Sequence],
    fail: Callable[[Request], None],
) -> dict[Request, None]:
    """Passes the scores of beams to their requests, which choose the continuations; returns requests that have ended.

    Args:
      new_beam: see `RequestFactory.new_beam`. fail: ends a request because its scores are not finite.
    """
    reported: dict[Request, None] = {}
    place_of = {row: place for place, row in enumerate(batch.sampled.tolist())}
    scores = output.scores
    assert scores is not None
    # Dropped beams leave their rows: read the rows first.
    for seq, row in [(scheduler.rows.seqs[row], row) for row in result.beams.tolist()]:
        assert seq is not None
        request, place = seq.owner, place_of[row]
        if output.tokens[place] < 0:
            fail(request)
            reported.setdefault(request)
        if request.finished:
            continue
        top = slice(request.beams.num_candidates)
        if not request.beams.report(seq, scores.top_ids[place, top], scores.top_logprobs[place, top]):
            continue
        beam = functools.partial(new_beam, request, salt=seq.kv.salt, num_question=seq.num_question)
        if not advance(request.beams, scheduler, beam):
            finish_beams(request)
            reported.setdefault(request)
    return reported


def record(
    scheduler: Scheduler,
    step: Step,
    output: StepOutput,
    result: StepResult,
    ended_s: float,
    reported_s: float,
    most_steps: int,
) -> StepRecord:
    """Returns the record of a step after `Scheduler.settle`. most_steps: that are scheduled at once."""
    blocks, batch, given, after = scheduler.blocks, step.batch, step.input, step.blocks_after
    moves = given.moves
    moved = (0, 0, 0) if moves is None else (len(moves.saves), len(moves.copies), len(moves.loads))
    if after is None or most_steps == 1:
        in_use, live = blocks.num_used - scheduler.row_blocks.num_ahead, result.live_blocks
    else:
        in_use = live = after
    return StepRecord(
        ended_s,
        batch.num_tokens,
        len(batch.decodes),
        len(scheduler.order),
        len(scheduler.waiting),
        in_use,
        step.peak_blocks,
        scheduler.num_preemptions,
        step.unshared_blocks,
        blocks.num_idle,
        step.began,
        step.schedule_s,
        reported_s - ended_s,
        output.compiled,
        given.shape,
        len(batch.chunks),
        given.num_sampled,
        given.num_attended,
        *moved,
        result.num_tokens,
        0 if given.drafts is None else int(given.drafts.counts.sum()),
        0 if output.num_accepted is None else int(output.num_accepted.sum()),
        live,
    )


def finish_beams(request: Request) -> None:
    """Turns a request's best beams into its completions."""
    assert request.beams is not None
    for completion, best in zip(request.completions, request.beams.finished, strict=False):
        seq = completion.seq
        seq.token_ids = np.append(seq.token_ids, np.array(best.token_ids, np.int32))
        seq.finish_reason, seq.stop_reason = best.finish_reason, best.stop_reason
        completion.cumulative_logprob = best.logprob
