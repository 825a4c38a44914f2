"""Passes scores of a step to the requests that ask for more than tokens: prompt log-probabilities, and beams."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ksana_jax.engine.beam import advance
from ksana_jax.engine.completion import Completion, Request
from ksana_jax.engine.steps import Step
from ksana_jax.engine.watched import top_logprobs
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.sequence import Rows, Sequence
from ksana_jax.scheduler.step.types import ScheduledBatch, StepOutput


def add_prompt_scores(rows: Rows, step: Step, output: StepOutput, rows_of: dict[Completion, int]) -> None:
    """Adds the log-probabilities and hidden states of prompt tokens that this step reports; called before
    `Scheduler.settle`.

    Args:
      rows_of: row of each completion that wants them.
    """
    scores, batch = output.prompt_scores, step.batch
    assert scores is not None or step.input.targets is None, "the executor was given targets and returned no scores"
    hidden = None if output.hidden is None else np.asarray(output.hidden)
    assert hidden is not None or not step.input.pools, "the executor was asked for hidden states and returned none"
    where = {row: i for i, row in enumerate(batch.rows.tolist()) if row not in batch.gone}
    for completion, row in rows_of.items():
        seq, count = completion.seq, completion.seq.params.prompt_logprobs
        if (count is None and not seq.pooling_type) or row not in where or row in rows.probes:
            continue
        i = where[row]
        computed = int(batch.num_per_row[i])
        last = step.ends[i]
        start = int(step.input.arrays.positions[last]) + 1 - computed
        token = int(last) + 1 - computed - start  # that of position 0
        if hidden is not None and seq.pooling_type:
            least = seq.num_prompt - 1 if seq.pooling_type == "LAST" else 0
            first, end = max(seq.num_pooled, start, least), min(start + computed, seq.num_prompt)
            if first < end:
                found = hidden[token + first : token + end].sum(axis=0, dtype=np.float64) / (seq.num_prompt - least)
                before = 0 if seq.owner.pooled is None else seq.owner.pooled
                seq.owner.pooled, seq.num_pooled = (before + found).astype(np.float32), end
        if count is None or scores is None:
            continue
        # The step scored prompt tokens start + 1 to start + computed; after a preemption, some are scored again.
        first, end = max(seq.num_scored, start + 1), min(start + computed, seq.num_prompt - 1)
        for offset in range(max(end + 1 - first, 0)):
            token_id = int(rows.token_ids[row, first + offset])
            seq.owner.prompt_logprobs.append(top_logprobs(scores, token + first - 1 + offset, token_id, count))
        seq.num_scored = max(seq.num_scored, end + 1)


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
