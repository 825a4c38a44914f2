"""The arrays of a step that verifies drafts: a tile for each row, of its newest token and its draft tokens. No jax.

Tokens of a tree that are equally far from the row's newest one have the same text position, but separate slots:
the n-th draft token's is n slots after the newest one's.
"""

from __future__ import annotations

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.types import ScheduledBatch, StepArrays, StepInput, StepShape, padded


def verification_arrays(
    shape: StepShape, decodes: np.ndarray, drafts: Drafts, rows: Rows, block_size: int, num_blocks: int
) -> StepArrays:
    """Returns the arrays of a step whose n decodes have blocks for their draft tokens.

    Args:
      shape: one part, of at least n tiles that hold the longest draft and one token; with `tree` if drafts branch.
      num_blocks: of the pool.
    """
    [(count, width)], groups, n = shape.parts, rows.num_groups, len(decodes)
    nth = np.arange(width, dtype=np.int32)
    tokens = np.zeros((count, width), np.int32)
    tokens[:n, 0] = rows.newest[decodes]
    longest = min(width - 1, drafts.ids.shape[1])
    tokens[:n, 1 : 1 + longest] = drafts.ids[:, :longest]
    real = np.zeros((count, width), bool)
    real[:n] = nth <= drafts.counts[:, None]
    root, depth, ancestors = rows.num_computed[decodes, None], nth, None
    if shape.tree:
        ancestors, depth = np.zeros((count, width), np.int32), np.zeros((n, width), np.int32)
        ancestors[:n, 0] = 1
        ancestors[:n, 1 : 1 + longest], depth[:, 1 : 1 + longest] = (x[:, :longest] for x in drafts.ancestry())
    positions = np.full((count, width), -1, np.int32)
    positions[:n] = root + depth
    evicted = rows.num_evicted[:, decodes, None]
    cached_at = np.full((groups, count, width), -1, np.int32)
    cached_at[:, :n] = positions[:n] - evicted
    stored_at = root + nth - evicted
    # The blocks of a row's newest tokens are adjacent at the end of its tables.
    end = (rows.allocated_until[decodes] - rows.num_evicted[:, decodes]) // block_size
    entry = (rows.num_blocks[:, decodes] - end)[..., None] + stored_at // block_size
    entry = np.minimum(entry, rows.block_tables.shape[2] - 1)  # of padding
    slots = np.full((groups, count, width), num_blocks * block_size, np.int32)
    blocks = rows.block_tables[np.arange(groups)[:, None, None], decodes[:, None], entry]
    slots[:, :n] = blocks * block_size + stored_at % block_size
    tables = np.zeros((groups, count, shape.table_width), np.int32)
    starts = np.full((groups, count, shape.table_width), FAR, np.int32)
    every = np.arange(count * width, dtype=np.int32)
    used = min(shape.table_width, rows.block_tables.shape[2])
    tables[:, :n, :used], starts[:, :n, :used] = (
        rows.block_tables[:, decodes, :used],
        rows.block_starts[:, decodes, :used],
    )
    return StepArrays(
        tokens=np.where(real, tokens, 0).reshape(-1),
        positions=np.where(real, positions, -1).reshape(-1),
        cache_positions=np.where(real, cached_at, -1).reshape(groups, -1),
        slots=np.where(real, slots, num_blocks * block_size).reshape(groups, -1),
        block_tables=tables,
        block_starts=starts,
        sampled=np.pad(every, (0, max(shape.max_sampled - len(every), 0))),
        ancestors=None if ancestors is None else np.where(real, ancestors, 0).reshape(-1),
    )


def verification(
    batch: ScheduledBatch,
    drafts: Drafts,
    rows: Rows,
    buckets: Buckets,
    block_size: int,
    num_blocks: int,
    acceptance: str,
) -> tuple[StepInput, np.ndarray]:
    """Returns a step with drafts, and the index of each row's last token; arguments as of `BatchBuilder`."""
    decodes, most = batch.decodes, int(drafts.counts.max())
    width = int(rows.num_blocks.take(decodes, axis=1).max())
    shape = buckets.verification(len(decodes), most, width, tree=drafts.parents is not None)
    if buckets.trees:
        drafts = drafts.with_parents()
    arrays = verification_arrays(shape, decodes, drafts, rows, block_size, num_blocks)
    num_attended = int(arrays.cache_positions.sum()) // rows.num_groups + shape.num_tokens
    [(count, tile)] = shape.parts
    ids = padded(drafts.ids[:, : tile - 1], (count, tile - 1), 0)
    parents = drafts.parents
    if parents is not None:
        parents = padded(np.ascontiguousarray(parents[:, : tile - 1], np.int32), (count, tile - 1), -1)
    filled = drafts._replace(ids=ids, counts=padded(drafts.counts, (count,), 0), parents=parents)
    step = StepInput(shape, arrays, shape.max_sampled, num_attended, drafts=filled, acceptance=acceptance)
    ends = (np.arange(len(decodes)) * tile + drafts.counts).astype(np.int32)
    return step, ends
