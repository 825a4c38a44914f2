"""Seconds of a step by counts of rows and tokens, for models that schedule no steps. Knows no requests."""

from __future__ import annotations

from collections.abc import Sequence

from ksana_jax.core.config import EngineConfig
from ksana_jax.lab.simulator.cost import AffineCost, Cost, Coverage
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.types import Part, StepShape

_NO_SHAPE = StepShape((Part(1, 1),), 1, 1)


class StepSeconds:
    """Asks a model of costs for the time of steps of an engine, the host's part included.

    Args:
      config: of the engine, with max_model_len set. cost: a model without state: the light one skips steps.
      platform: whose buckets the steps are padded to.

    Attributes:
      coverage: how many of the steps that were counted the model of costs knows.
    """

    def __init__(self, config: EngineConfig, cost: Cost, platform: str = "cpu"):
        self._cost, self._block_size, self._overlaps = cost, config.block_size, config.async_scheduling
        self._buckets = Buckets.of(config, platform)
        self._has_shapes = not isinstance(cost, AffineCost)
        self._size: StepSize | None = None
        self.coverage = Coverage()

    def __call__(self, rows: int, context: int, chunks: Sequence[tuple[int, int]], sampled: int) -> float:
        """Returns the seconds of a step.

        Args:
          rows: that decode. context: tokens that they have computed, all together.
          chunks: (tokens computed before, tokens computed now) of each other row.
          sampled: tokens whose logits are computed.
        """
        chunked = sum(count for _, count in chunks)
        attended = context + rows + sum(count * done + count * (count + 1) // 2 for done, count in chunks)
        size = StepSize(
            self._shape(rows, context, chunks) if self._has_shapes else _NO_SHAPE,
            self._buckets.num_sampled(sampled),
            num_tokens=rows + chunked,
            num_chunked=chunked,
            num_attended=attended,
            num_rows=rows + len(chunks),
        )
        self._size = size
        device_s, host_s = self._cost.seconds(size) + self._after(size), self._cost.host_seconds(size)
        return max(device_s, host_s) if self._overlaps else device_s + host_s

    def _after(self, size: StepSize) -> float:
        """Returns the seconds by which a step with chunks makes the one after it longer."""
        if not size.num_chunked or not self._has_shapes:
            return 0.0
        rows = size.num_rows
        shape = self._shape(rows, size.num_attended, ())
        decode = StepSize(shape, self._buckets.num_sampled(rows), rows, 0, rows, rows)
        return self._cost.seconds(decode._replace(after_chunk=True)) - self._cost.seconds(decode)

    def count(self, steps: int, step_s: float) -> None:
        """Counts steps of the size that was last asked for: not all that are asked for are computed."""
        if self._has_shapes and (size := self._size) is not None:
            self.coverage.add(size.shape, self._cost.knows(size), steps * step_s, steps)

    def _shape(self, rows: int, context: int, chunks: Sequence[tuple[int, int]]) -> StepShape:
        longest = max([context // max(rows, 1) + 1, *(done + count for done, count in chunks)])
        counts = [count for _, count in chunks if count > 1]
        width = min(-(-longest // self._block_size), self._buckets.widths[-1])
        return self._buckets.shape(rows + len(chunks) - len(counts), counts, width)
