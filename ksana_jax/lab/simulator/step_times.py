"""The sizes of recorded steps, and the time that each took on the device. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from ksana_jax.core.metrics import StepRecord
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.scheduler.step.types import StepShape


def sizes_of(records: Sequence[StepRecord]) -> list[StepSize]:
    """Returns the sizes of recorded steps."""
    chunks = [False, *(record.num_chunks > 0 for record in records)]
    return [_size_of(record, after_chunk) for record, after_chunk in zip(records, chunks, strict=False)]


def _size_of(record: StepRecord, after_chunk: bool) -> StepSize:
    return StepSize(
        record.shape,
        record.num_sampled,
        record.num_tokens,
        record.num_chunk_tokens,
        record.num_attended,
        record.num_decodes + record.num_chunks,
        record.num_saved,
        record.num_copied,
        record.num_loaded,
        after_chunk,
    )


def device_seconds(records: Sequence[StepRecord]) -> list[float]:
    """Returns the time of each step on the device: from its submission, or from the end of the one before it if that
    was later, to its end.

    Where the host takes longer than the device, this is the host's time: a bound, which only matters where the same
    steps meet a faster host.
    """
    before, found = -float("inf"), []
    for record in records:
        found.append(record.ended_s - max(record.began_s, before))
        before = record.ended_s
    return found


def usable(records: Sequence[StepRecord]) -> list[bool]:
    """Returns whether the time of each step is undisturbed: neither it nor an adjacent step was compiled, and it
    is not the first of its shape."""
    seen: set[StepShape] = set()
    found = []
    for at, record in enumerate(records):
        compiled = any(near.compiled for near in records[max(at - 1, 0) : at + 2])
        found.append(not compiled and record.shape in seen)
        seen.add(record.shape)
    return found
