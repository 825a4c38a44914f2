"""Submits steps to the executor: one, or several that share a call. Knows rows and blocks; no requests, no jax."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.step.builder import BatchBuilder
from ksana_jax.step.contract import Executor, Pending, ScheduledBatch, StepInput, StepOutput, share_a_call


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
