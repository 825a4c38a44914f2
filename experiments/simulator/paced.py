"""A device that only takes its time: a real engine in real time, whose steps last as long as in a cost model.

Scheduler, builder of arrays, server and clients are real and run at the machine's speed; instead of computing, the
device waits, and the processors are free meanwhile, as with a GPU. This shows two
things that a CPU device hides: how well a simulation predicts a device of steady speed, and a server's cost. No jax.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.engine.engine import Engine
from ksana_jax.lab.simulator.cost import Cost, Seed
from ksana_jax.lab.simulator.executor import TimedExecutor
from ksana_jax.lab.simulator.step_size import SizeBuilder, SizedStep
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.types import ScheduledBatch, StepInput
from ksana_jax.serve.workload.tokens import FIRST_TOKEN

# A longer step is a mistake in the cost model.
MAX_WAIT_S = 3600


@dataclasses.dataclass(frozen=True)
class WallClock:
    """A real-time clock: `advance_to` sleeps until a time has come."""

    now: Callable[[], float]

    def __call__(self) -> float:
        return self.now()

    def advance_to(self, time_s: float) -> None:
        left_s = time_s - self.now()
        if left_s > MAX_WAIT_S:
            raise ConfigError(f"a step of the paced device takes {left_s:,.4g} s, must be at most {MAX_WAIT_S:,} s")
        if left_s > 0:
            time.sleep(left_s)


class PacedExecutor(TimedExecutor):
    """A `TimedExecutor` in real time, of an engine that may belong to an LLM."""

    num_compilations = 0


class PacedBuilder(SizeBuilder):
    """Builds the arrays of steps, as an engine with a device does, and records their sizes."""

    def build(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepInput, np.ndarray]:
        sized, _ = super().build(batch, rows)
        assert isinstance(sized, SizedStep)
        step, ends = BatchBuilder.build(self, batch, rows)
        fields = {f.name: getattr(step, f.name) for f in dataclasses.fields(StepInput)}
        return SizedStep(**fields, size=sized.size, tokens=sized.tokens), ends


@dataclasses.dataclass(frozen=True)
class AnyTokens:
    """Meaningless tokens, which follow from their places in the texts."""

    vocab_size: int

    def of(self, batch: ScheduledBatch, lengths: np.ndarray, rows: Rows) -> np.ndarray:
        places = lengths if batch.samples is None else lengths[batch.samples]
        return (FIRST_TOKEN + 7919 * places % (self.vocab_size - FIRST_TOKEN)).astype(np.int32)


def pace(engine: Engine, cost: Cost, seed: Seed = None) -> None:
    """Lets the steps of an engine take their time instead of being computed; its answers are then any tokens.

    Requests must ask for a number of tokens and nothing that depends on them, such as log-probabilities.

    Args:
      cost: of steps; its host part is not used. seed: of the noise of steps; None for none.

    Raises:
      ConfigError: the engine has tiers or drafts, whose work is not imitated.
    """
    if engine.memory.host is not None or engine.scheduler.speculation is not None:
        raise ConfigError("an engine with a paced device has neither a host tier nor speculative_config")
    patterns = engine.executor.patterns
    engine.executor = PacedExecutor(WallClock(engine.clock), cost.start(seed), patterns)
    tokens = AnyTokens(engine.model.vocab_size)
    engine.builder = PacedBuilder.like(engine.builder, tokens, lambda size: None)
