"""Steps whose rows share leading blocks: attention over these runs once for several rows. No jax.

Decoding rows are sorted by their block tables and cut into groups of a fixed number of rows. The leading blocks that
all rows of a group share form a table of the group; the rest stays in the rows' own tables. To attention, a group with
a common table looks like a tile of queries: no ragged membership, and one compiled shape for any sharing.

Source: Hydragen, arXiv:2402.05099; cascade inference in FlashInfer, arXiv:2501.01005.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.types import ScheduledBatch, StepArrays, StepShape, padded

# Rows per group: keys are read once for this many queries; smaller groups are padded.
SHARED_ROWS = 8


class SharedRuns(NamedTuple):
    """Rows ordered so that each `group_rows` consecutive rows may share blocks.

    order: [D] indices into the given rows. runs: [Gk, C] number of leading blocks of each table that a group of rows
      shares, after the first `first`.
    """

    order: np.ndarray
    runs: np.ndarray


def find_shared_runs(
    tables: np.ndarray, num_blocks: np.ndarray, group_rows: int, *, first: int, min_saved: int
) -> SharedRuns:
    """Groups rows by the beginnings of their block tables.

    Args:
      tables: [Gk, D, P] blocks of each row, in each group of layers. num_blocks: [Gk, D] number of valid entries; the
        last block is written to, never shared.
      group_rows: rows per group; the last group may have fewer.
      first: number of leading entries that must not be shared.
      min_saved: minimum blocks x rows that a group must save in order to share.
    """
    kinds, count, width = tables.shape
    num_groups = -(-count // group_rows)
    if width <= first:
        return SharedRuns(np.arange(count), np.zeros((kinds, num_groups), np.intp))
    # Sorting puts equal beginnings next to each other; a few columns of the longest tables distinguish long runs.
    longest = tables[num_blocks.sum(axis=1).argmax()]
    order = np.lexsort([longest[:, min(first + depth, width - 1)] for depth in (48, 12, 3, 0)])
    in_groups = np.pad(order, (0, num_groups * group_rows - count), mode="edge")
    grouped = tables[:, in_groups].reshape(kinds, num_groups, group_rows, width)[..., first:]
    same = (grouped == grouped[:, :, :1]).all(axis=2)
    least = num_blocks[:, in_groups].reshape(kinds, num_groups, group_rows).min(axis=2) - 1 - first
    same &= np.arange(width - first) < least[..., None]
    runs = np.where(same.all(axis=2), width - first, same.argmin(axis=2))
    members = np.full(num_groups, group_rows)
    members[-1] -= len(in_groups) - count
    return SharedRuns(order, np.where(runs * (members - 1) >= max(min_saved, 1), runs, 0))


def split_tables(
    tables: np.ndarray, starts: np.ndarray, runs: np.ndarray, group_rows: int, first: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Splits tables into the groups' shared tables and the rows' remaining ones, for one group of layers.

    Args:
      tables, starts: [D, P] in the order of the groups. runs: [C], see `SharedRuns`.
      width: width of the resulting tables, enough for the longest.

    Returns:
      shared tables and starts [C, width], own tables and starts [D, width]; 0 and FAR if absent.
    """
    columns = np.arange(width)
    shared_at = np.minimum(columns + first, tables.shape[1] - 1)
    heads = slice(0, None, group_rows)
    inside = columns < runs[:, None]
    shared_tables = np.where(inside, tables[heads][:, shared_at], 0)
    shared_starts = np.where(inside, starts[heads][:, shared_at], FAR)
    own_at = columns + np.where(columns < first, 0, np.repeat(runs, group_rows)[: len(tables), None])
    beyond = own_at >= tables.shape[1]
    own_at = np.where(beyond, 0, own_at)
    own_tables = np.where(beyond, 0, np.take_along_axis(tables, own_at, axis=1))
    own_starts = np.where(beyond, FAR, np.take_along_axis(starts, own_at, axis=1))
    i32 = np.int32
    return shared_tables.astype(i32), shared_starts.astype(i32), own_tables.astype(i32), own_starts.astype(i32)


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
