"""Passes scores of a step to the requests that ask for more than tokens: prompt log-probabilities, and beams."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from ksana_jax.engine.beam import advance
from ksana_jax.engine.completion import Completion, Request
from ksana_jax.engine.steps import Step
from ksana_jax.engine.watched import top_logprobs
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.sequence import Rows, Sequence
from ksana_jax.scheduler.step.types import ScheduledBatch, StepOutput


def add_prompt_scores(rows: Rows, step: Step, output: StepOutput, rows_of: dict[Completion, int]) -> None:
    """Adds the log-probabilities of the prompt tokens scored by this step; called before `Scheduler.settle`.

    Args:
      rows_of: row of each completion that wants them.
    """
    scores = output.prompt_scores
    assert scores is not None, "the executor was given targets and returned no scores"
    for seq, row, start, computed, token in _computed(rows, step, rows_of):
        if (count := seq.params.prompt_logprobs) is None:
            continue
        # The step scored prompt tokens start + 1 to start + computed; after a preemption, some are scored again.
        first, end = max(seq.num_scored, start + 1), min(start + computed, seq.num_prompt - 1)
        token += first - 1 - start
        for offset in range(max(end + 1 - first, 0)):
            token_id = int(rows.token_ids[row, first + offset])
            seq.owner.prompt_logprobs.append(top_logprobs(scores, token + offset, token_id, count))
        seq.num_scored = max(seq.num_scored, end + 1)


def add_hidden(rows: Rows, step: Step, output: StepOutput, rows_of: dict[Completion, int]) -> None:
    """Adds the hidden states of the prompt tokens computed by this step to `Request.pooled`; called before
    `Scheduler.settle`, arguments as of `add_prompt_scores`."""
    assert output.hidden is not None, "the executor was asked for hidden states and returned none"
    for seq, _, start, computed, token in _computed(rows, step, rows_of):
        last = seq.num_prompt - 1 if seq.pooling_type == "LAST" else 0
        first, end = max(seq.num_pooled, start, last), min(start + computed, seq.num_prompt)
        if seq.pooling_type is not None and first < end:
            found = output.hidden[token + first - start : token + end - start].sum(axis=0, dtype=np.float64)
            before, request = seq.owner.pooled, seq.owner
            request.pooled = (found / (seq.num_prompt - last) + (0 if before is None else before)).astype(np.float32)
            seq.num_pooled = end


def _computed(rows: Rows, step: Step, rows_of: dict[Completion, int]) -> Iterator[tuple[Sequence, int, int, int, int]]:
    """Yields, for each row of a step but probes: sequence, row, position of its first token in the step, number of its
    tokens, and place of the first among the step's."""
    batch = step.batch
    where = {row: i for i, row in enumerate(batch.rows.tolist()) if row not in batch.gone}
    for completion, row in rows_of.items():
        if row in where and row not in rows.probes:
            count, last = int(batch.num_per_row[where[row]]), int(step.ends[where[row]])
            yield completion.seq, row, int(step.input.arrays.positions[last]) + 1 - count, count, last + 1 - count


def advance_beams(
    scheduler: Scheduler,
    batch: ScheduledBatch,
    output: StepOutput,
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
    for seq, row in [(scheduler.rows.seqs[row], row) for row in batch.beams.tolist()]:
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
            _finish_beams(request)
            reported.setdefault(request)
    return reported


def _finish_beams(request: Request) -> None:
    """Turns a request's best beams into its completions."""
    assert request.beams is not None
    for completion, best in zip(request.completions, request.beams.finished, strict=False):
        seq = completion.seq
        seq.token_ids = np.append(seq.token_ids, np.array(best.token_ids, np.int32))
        seq.finish_reason, seq.stop_reason = best.finish_reason, best.stop_reason
        completion.cumulative_logprob = best.logprob
