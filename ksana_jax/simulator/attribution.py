"""Which step a measured second belongs to, where a step is submitted while the one before it runs. No jax.

The host sees a step's result only when it has submitted the next one, and that one may already use the processor: on a
CPU with two cores, a decode step before a chunk is seen to take three times as long as others, and the chunk less than
it does alone. Decode steps are therefore timed where no chunk is next to them; chunks together with the steps before
and after them, less what these take elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ksana_jax.metrics import StepRecord
from ksana_jax.simulator.step_size import StepSize


def beside_chunks(records: Sequence[StepRecord]) -> list[bool]:
    """Returns for each step whether the one before or after it has chunks."""
    chunks = [False, *(record.num_chunks > 0 for record in records), False]
    return [before or after for before, after in zip(chunks, chunks[2:], strict=False)]


def chunk_seconds(
    records: Sequence[StepRecord],
    seconds: Sequence[float],
    sizes: Sequence[StepSize],
    decode: Callable[[StepSize], float],
) -> list[float]:
    """Returns the seconds of steps, those of chunks with what decode steps beside them have of their time.

    Args:
      seconds: as measured. decode: returns what a decode step takes on its own.
    """
    found = list(seconds)
    beyond = [0.0 if r.num_chunks else s - decode(size) for r, s, size in zip(records, seconds, sizes, strict=True)]
    first = 0
    while first < len(records):
        last = first
        while last < len(records) and records[last].num_chunks:
            last += 1
        if last > first:
            total = sum(seconds[first:last])
            shared = [at for at in (first - 1, last) if 0 <= at < len(records)]
            # Only steps that were submitted while the one before them ran have anything of each other's time.
            overlapping = [at for at in shared if records[max(at, first)].began_s < records[max(at, first) - 1].ended_s]
            more = sum(beyond[at] / (1 + _between_chunks(records, at)) for at in overlapping)
            scale = max(total + more, 0.0) / total if total else 1.0
            found[first:last] = [s * scale for s in seconds[first:last]]
        first = max(last, first + 1)
    return found


def _between_chunks(records: Sequence[StepRecord], at: int) -> bool:
    """Whether both steps beside a step have chunks: each then gets half of what it has beyond its own time."""
    return 0 < at < len(records) - 1 and bool(records[at - 1].num_chunks and records[at + 1].num_chunks)
