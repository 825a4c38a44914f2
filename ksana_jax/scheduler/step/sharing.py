"""The decodes of a step in which groups of rows share leading blocks. No jax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.shared_prefix import find_shared_runs, split_tables
from ksana_jax.scheduler.step.types import ScheduledBatch, StepArrays, StepShape, padded


def sharing_decodes(
    batch: ScheduledBatch,
    rows: Rows,
    buckets: Buckets,
    with_decodes: Callable[[StepShape, np.ndarray, Rows], StepArrays],
    first: int,
    min_saved: int,
    residual_groups: tuple[int, ...] | None,
) -> tuple[StepShape, StepArrays, np.ndarray] | None:
    """Returns shape, arrays and index of each decode's token for a step in which groups of decodes share leading
    blocks; None if no group does.

    Args:
      with_decodes: returns the arrays of a step with its decodes.
      first, min_saved: see `find_shared_runs`. residual_groups: see `BatchBuilder`.
    """
    decodes, group_rows = batch.decodes, buckets.shared_rows
    count = rows.num_blocks[:, decodes]
    tables = rows.block_tables[:, decodes, : int(count.max())]
    found = find_shared_runs(tables, count, group_rows, first=first, min_saved=min_saved)
    if residual_groups:  # few blocks, and keys and values of one layer must stay at the same places
        found.runs[list(residual_groups)] = 0
    if not found.runs.any():
        return None
    decodes, ordered = decodes[found.order], tables[:, found.order]
    own = count[:, found.order] - np.repeat(found.runs, group_rows, axis=1)[:, : len(decodes)]
    width = max(int(own.max()), int(found.runs.max()), int(rows.num_blocks[:, batch.chunks].max(initial=0)))
    shape = buckets.shape(len(decodes), batch.counts, width, shares=True)
    arrays = with_decodes(shape, decodes, rows)
    own_shape, width = arrays.block_tables.shape, shape.table_width
    shared_shape = rows.num_groups, shape.num_groups, width
    starts = rows.block_starts[:, decodes, : ordered.shape[2]]
    split = [split_tables(*of, group_rows, first, width) for of in zip(ordered, starts, found.runs, strict=True)]
    shared_tables, shared_starts, own_tables, own_starts = map(np.stack, zip(*split, strict=True))
    arrays = arrays._replace(
        shared_tables=padded(shared_tables, shared_shape, 0),
        shared_starts=padded(shared_starts, shared_shape, FAR),
        block_tables=padded(own_tables, own_shape, 0),
        block_starts=padded(own_starts, own_shape, FAR),
    )
    return shape, arrays, np.argsort(found.order).astype(np.int32)
