"""Steps of an engine: scheduled, built, submitted one or several in a call, waited for, recorded.

Knows rows and blocks; no jax, no files."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable

import numpy as np

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.metrics import StepRecord
from ksana_jax.scheduler.scheduler import Scheduler
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.executor import Executor, Pending, share_a_call
from ksana_jax.scheduler.step.types import ScheduledBatch, StepInput, StepOutput


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


class StepLoop:
    """Steps under way; the base of `Engine`, which adds requests.

    Args:
      scheduler: owns rows and blocks.
      builder: turns its batches into arrays.
      executor: computes them.
      config: settings of the engine.
      clock: seconds, rising.

    Attributes:
      memory: knows where every block is. records: of all steps that have ended.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        executor: Executor,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.scheduler, self.builder, self.executor = scheduler, builder, executor
        self.memory, self.config, self.clock = scheduler.memory, config, clock
        self.records: list[StepRecord] = []
        # Steps of the call that is being reported, and of the call after it.
        self._running: Steps = collections.deque()
        self._ahead: Steps = collections.deque()
        # When the last step was recorded; None if the engine has been idle since.
        self._recorded_s: float | None = None
        # On the host an embedding is looked up before the step, for which its tokens must be known.
        feeds = config.embedding_device == "device"
        self.runs_ahead = config.async_scheduling and feeds
        self._most_steps = config.num_scheduler_steps if feeds else 1
        # Other processes, and the second step of a call, get masks before the tokens that these follow from.
        self._masks_late = config.distributed is None and self._most_steps == 1
        # Called with each step, whose pool they may read, and the rows of completions; steps then run one by one.
        self.inspectors: list[Callable[..., None]] = []

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def num_steps_under_way(self) -> int:
        """Number of steps that are submitted and not yet reported."""
        return len(self._running) + len(self._ahead)

    def _next_step(self) -> Step | None:
        """Returns the next step that is submitted, and submits those after it; None if nothing can be computed."""
        if not self._running:
            since = self.clock() if self._recorded_s is None else self._recorded_s
            if not self._ahead:
                self._ahead = self._submit(self.scheduler.schedule(), since)
                if not self._ahead:
                    return None
                since = self._ahead[-1].began
            self._running, self._ahead = self._ahead, collections.deque()
            last = self._running[-1]
            self.scheduler.advance(last.batch)
            if self.runs_ahead and not self.inspectors:
                self._ahead = self._submit(self._schedule_after(last), since)
        return self._running.popleft()

    def _submit(self, batch: ScheduledBatch | None, since: float) -> Steps:
        """Submits a step, if there is one, and those that follow in the same call: decodes, while no request waits.

        A call has `num_scheduler_steps`. Fewer, or steps that differ, are submitted one by one.

        Args:
          since: when the host began to schedule the step.
        """
        steps: Steps = collections.deque()
        while batch is not None:
            steps.append(self._build(batch, since))
            since = steps[-1].began
            if batch.admitted:  # of a call only the first step admits requests
                self._note_admitted(batch, since)
            if len(steps) == self._most_steps or len(batch.chunks) or self.scheduler.waiting or self.inspectors:
                break
            batch = self._schedule_after(steps[-1])
        inputs = [step.input for step in steps]
        if len(inputs) == self._most_steps > 1 and share_a_call(inputs):
            pending = self.executor.submit_together(inputs)
        else:
            pending = [self.executor.submit(given) for given in inputs]
        for step, result in zip(steps, pending, strict=True):
            step.pending = result
        return steps

    def _schedule_after(self, step: Step) -> ScheduledBatch | None:
        """Schedules the step after the last one submitted or built, whose tokens are not known yet; None if it has to
        wait for them, or there is none."""
        self.scheduler.advance(step.batch)
        blocks_after = self.scheduler.blocks.num_used
        if self.scheduler.rows.settings.matchers and not self._masks_late:
            return None
        if (batch := self.scheduler.schedule_ahead(step.batch)) is not None:
            step.blocks_after = blocks_after
        return batch

    def _build(self, batch: ScheduledBatch, since: float) -> Step:
        scheduler = self.scheduler
        given, ends = self.builder.build(batch, scheduler.rows)
        given.moves = scheduler.memory.take_moves()
        peak_blocks, began = scheduler.blocks.num_used, self.clock()
        return Step(batch, given, ends, began, began - since, peak_blocks, scheduler.row_blocks.num_held)

    def _note_admitted(self, batch: ScheduledBatch, now: float) -> None:
        """Records when requests are scheduled for the first time; now: when the step began."""
        for row in batch.admitted:
            seq = self.scheduler.rows.seqs[row]
            assert seq is not None
            if seq.owner.metrics.scheduled_s is None:
                seq.owner.metrics.scheduled_s = now

    def _collect(self, step: Step) -> tuple[StepOutput, float]:
        """Waits for a step; returns its output and the time. Choices that use measured times learn the step's."""
        assert step.pending is not None
        output, memory, speculation = step.pending.result(), self.memory, self.scheduler.speculation
        now, has_chunks = self.clock(), len(step.batch.chunks) > 0
        memory.commit()
        if speculation is not None:
            shape = None if output.compiled or has_chunks else step.input.shape
            speculation.observe_step(shape, step.began - step.schedule_s, now)
        if memory.swap is not None and memory.swap.weighs_costs:
            prefills = step.batch.num_tokens if has_chunks else 0
            memory.costs.observe(prefills, now - step.began, step.input.moves, output.move_s)
        return output, now

    def _wait(self) -> None:
        """Waits for the disk when nothing can be computed."""
        reads = self.memory.disk_reads
        if reads is not None and reads.num_pending:
            reads.wait()
        elif self.scheduler.has_work:
            raise RuntimeError("there is work, and none of it can be scheduled")
        self.make_moves()

    def _record(self, step: Step, output: StepOutput, ended_s: float) -> None:
        """Records a step after `Scheduler.settle`."""
        scheduler, batch, given, now = self.scheduler, step.batch, step.input, self.clock()
        blocks, moves = scheduler.blocks, given.moves
        moved = (0, 0, 0) if moves is None else (len(moves.saves), len(moves.copies), len(moves.loads))
        if step.blocks_after is None or self._most_steps == 1:
            in_use, live = blocks.num_used - scheduler.row_blocks.num_ahead, batch.live_blocks
        else:
            in_use = live = step.blocks_after
        record = StepRecord(
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
            now - ended_s,
            output.compiled,
            given.shape,
            len(batch.chunks),
            given.num_sampled,
            given.num_attended,
            *moved,
            batch.num_new_tokens,
            0 if given.drafts is None else int(given.drafts.counts.sum()),
            0 if output.num_accepted is None else int(output.num_accepted.sum()),
            live,
        )
        self.records.append(record)
        self._recorded_s = now

    def make_moves(self) -> None:
        """Runs pending block moves when no step is coming to carry them."""
        if (moves := self.memory.take_moves()) is not None:
            self.executor.move(moves)
            self.memory.commit()
