"""Executors that compute nothing and take the time of a cost model. No jax.

The device works through its steps in the order of their submission, each from when it is submitted or the one before it
has ended, whichever is later. The host's time for a step (its schedule and arrays, and the report of the one before it)
passes when its size is known, before it is submitted. With async_scheduling the engine submits a step while the one
before it runs, so that the host's time is hidden as far as that one lasts; without, every step waits for the host. Only
the order of the engine's calls makes this difference, as it does on a real device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.kv.moves import Moves
from ksana_jax.lab.simulator.clock import Clock, VirtualClock
from ksana_jax.lab.simulator.cost import Timer
from ksana_jax.lab.simulator.step_size import SizedStep, StepSize
from ksana_jax.scheduler.step.types import StepInput, StepOutput


class TimedStep(NamedTuple):
    """A submitted step; see `step.executor.Pending`. ends_s: when the device will have computed it."""

    clock: Clock
    ends_s: float
    output: StepOutput

    def result(self) -> StepOutput:
        self.clock.advance_to(self.ends_s)
        return self.output


class TimedExecutor:
    """A `step.executor.Executor` that takes time only; an engine with it needs a `SizeBuilder`.

    Args:
      clock: of the engine.
      timer: of steps.
      patterns: one for each layer.
      num_host_blocks, num_host_states: blocks of host memory, and slots for states, without contents.
      block_bytes, slot_bytes: size of a block and of a slot, which decides how long it takes to move.

    Attributes:
      busy_s: total seconds of work of the device.
    """

    def __init__(
        self,
        clock: Clock,
        timer: Timer,
        patterns: Sequence[AttentionPattern],
        num_host_blocks: int = 0,
        block_bytes: int = 0,
        num_host_states: int = 0,
        slot_bytes: int = 0,
    ):
        self.clock, self.timer, self.patterns = clock, timer, list(patterns)
        self._block_bytes, self._slot_bytes = block_bytes, slot_bytes
        self.host_blocks, self.host_states = (np.zeros((n, 1), np.uint8) for n in (num_host_blocks, num_host_states))
        self.busy_s = self._free_at = 0.0

    def submit(self, step: StepInput) -> TimedStep:
        return self.submit_together([step])[0]

    def submit_together(self, steps: Sequence[StepInput]) -> list[TimedStep]:
        """Submits steps that share a call: their results arrive together."""
        together: list[tuple[SizedStep, float]] = []
        seconds = 0.0
        for step in steps:
            assert isinstance(step, SizedStep), "an engine with a SimExecutor builds its steps with a SizeBuilder"
            size = step.size.with_moves(step.moves)
            move_s = 0.0 if step.moves is None else self._moving(step.moves)
            seconds += self.timer.seconds(size) + move_s
            together.append((step, move_s))
        self._free_at = max(self.clock(), self._free_at) + seconds
        self.busy_s += seconds
        return [TimedStep(self.clock, self._free_at, StepOutput(step.tokens, move_s=s)) for step, s in together]

    def move(self, moves: Moves) -> None:
        self.occupy(self._moving(moves))

    def occupy(self, seconds: float) -> None:
        """Lets the device work on something else than steps."""
        self._free_at = max(self.clock(), self._free_at) + seconds
        self.busy_s += seconds

    def _moving(self, moves: Moves) -> float:
        found = [(self._block_bytes, moves)] + ([] if moves.states is None else [(self._slot_bytes, moves.states)])
        move = self.timer.cost.move
        return sum(move.seconds(size, len(x.saves), len(x.copies), len(x.loads)) for size, x in found)

    def set_patterns(self, patterns: Sequence[AttentionPattern]) -> None:
        self.patterns = list(patterns)

    def reset(self) -> None:
        self.host_blocks, self.host_states = map(np.zeros_like, (self.host_blocks, self.host_states))


class SimExecutor(TimedExecutor):
    """A `TimedExecutor` in simulated time, where the host's part of a step takes time only if configured.

    Attributes:
      host_s: total seconds of work of the host.
    """

    def __init__(self, clock: VirtualClock, *args: Any, **settings: Any):
        super().__init__(clock, *args, **settings)
        self._virtual, self.host_s = clock, 0.0

    def host_works(self, size: StepSize) -> None:
        """Lets the host's time for a step pass."""
        seconds = self.timer.host_seconds(size)
        self._virtual.advance(seconds)
        self.host_s += seconds
