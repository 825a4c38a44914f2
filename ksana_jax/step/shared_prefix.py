"""Which rows of a step share how many leading blocks, so that attention over those runs once for all of them. No jax.

Rows that decode are put next to each other by their block tables and cut into groups of a fixed number of rows; what
all rows of a group have in common becomes one table of the group, the rest stays in theirs. A group of rows with a
common table is for attention what a tile of queries is: no ragged membership, and one compiled shape for any sharing.

Source: Hydragen, arXiv:2402.05099; cascade inference in FlashInfer, arXiv:2501.01005.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ksana_jax.patterns import FAR

# Rows of a group: keys are read once for so many queries, and a group of fewer rows is filled up with padding.
SHARED_ROWS = 8


class SharedRuns(NamedTuple):
    """Rows in an order in which each `group_rows` of them may share blocks.

    order: [D] indices into the rows given. runs: [Gk, C] leading blocks of each table that a group of rows shares,
      after the first `first`.
    """

    order: np.ndarray
    runs: np.ndarray


def find_shared_runs(
    tables: np.ndarray, num_blocks: np.ndarray, group_rows: int, *, first: int, min_saved: int
) -> SharedRuns:
    """Groups rows by the beginnings of their block tables.

    Args:
      tables: [Gk, D, P] blocks of each row, in each group of layers. num_blocks: [Gk, D] how many of them count; the
        last is written to, never shared.
      group_rows: rows of a group; the last group may have fewer.
      first: leading entries that are not to be shared.
      min_saved: blocks x rows that must be spared for a group to share.
    """
    kinds, count, width = tables.shape
    num_groups = -(-count // group_rows)
    if width <= first:
        return SharedRuns(np.arange(count), np.zeros((kinds, num_groups), np.intp))
    # Equal beginnings end up side by side; a few columns of the longest tables tell long common ones from short ones.
    longest = tables[num_blocks.sum(axis=1).argmax()]
    order = np.lexsort([longest[:, min(first + depth, width - 1)] for depth in (48, 12, 3, 0)])
    padded = np.pad(order, (0, num_groups * group_rows - count), mode="edge")
    grouped = tables[:, padded].reshape(kinds, num_groups, group_rows, width)[..., first:]
    same = (grouped == grouped[:, :, :1]).all(axis=2)
    least = num_blocks[:, padded].reshape(kinds, num_groups, group_rows).min(axis=2) - 1 - first
    same &= np.arange(width - first) < least[..., None]
    runs = np.where(same.all(axis=2), width - first, same.argmin(axis=2))
    members = np.full(num_groups, group_rows)
    members[-1] -= len(padded) - count
    return SharedRuns(order, np.where(runs * (members - 1) >= max(min_saved, 1), runs, 0))


def split_tables(
    tables: np.ndarray, starts: np.ndarray, runs: np.ndarray, group_rows: int, first: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tables of the groups, and what is left of the rows' own; of one group of layers.

    Args:
      tables, starts: [D, P] in the order of the groups. runs: [C], see `SharedRuns`.
      width: of the tables that come out; it holds the longest of them.

    Returns:
      shared tables and starts [C, width], own tables and starts [D, width]; 0 and FAR where there is nothing.
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
