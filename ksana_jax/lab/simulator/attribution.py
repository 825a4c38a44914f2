"""Attributes measured seconds to steps, where a step is submitted while the one before it runs. No jax.

The host sees a step's result only when it has submitted the next one, and that one may already use the processor: on a
CPU with two cores, a decode step before a chunk is seen to take three times as long as others, and the chunk less than
it does alone. Decode steps are therefore timed where no chunk follows; chunks together with the step before them, minus
the time that step takes elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ksana_jax.core.metrics import StepRecord
from ksana_jax.lab.simulator.step_size import StepSize


def before_chunks(records: Sequence[StepRecord]) -> list[bool]:
    """Returns for each step whether the one after it has chunks."""
    return [*(record.num_chunks > 0 for record in records[1:]), False][: len(records)]


def chunk_seconds(
    records: Sequence[StepRecord],
    seconds: Sequence[float],
    sizes: Sequence[StepSize],
    decode: Callable[[StepSize], float],
) -> list[float]:
    """Returns the seconds of steps; a chunk's include its time that the decode step before it was charged.

    Args:
      seconds: as measured. decode: returns the seconds of a decode step alone.
    """
    found = list(seconds)
    first = 0
    while first < len(records):
        last = first
        while last < len(records) and records[last].num_chunks:
            last += 1
        before = first - 1
        # Only a step that was submitted while the one before it ran has any of its time.
        if last > first > 0 and records[first].began_s < records[before].ended_s:
            total = sum(seconds[first:last])
            scale = max(total + seconds[before] - decode(sizes[before]), 0.0) / total if total else 1.0
            found[first:last] = [s * scale for s in seconds[first:last]]
        first = max(last, first + 1)
    return found
