"""Steps that verify drafts: a tile for each row, of its newest token and its draft tokens. No jax.

Tokens of a tree that are equally far from the row's newest one have the same sequence position, but separate slots:
the n-th draft token's is n slots after the newest one's.
"""

from __future__ import annotations

import functools

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.buckets import Buckets, at_least
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.types import ScheduledBatch, StepArrays, StepInput, StepShape, TileGroup, padded

# Logits of this many tokens take hardly longer than one token's: the matrix that computes them is read once.
FEW_TOKENS = 16


def most_drafts(buckets: Buckets, num_rows: int) -> int:
    """Returns the maximum draft tokens of each row that a step of num_rows decodes can verify."""
    return max((part.width - 1 for part in buckets.verifications if part.count >= num_rows), default=0)


def verification_shape(buckets: Buckets, num_rows: int, most: int, width: int, tree: bool = False) -> StepShape:
    """Returns the smallest bucket for decodes with up to `most` draft tokens.

    Args:
      width: width of the widest block table. tree: True if drafts branch.
    """
    part = next(p for p in buckets.verifications if p.count >= num_rows and p.width > most)
    return shape_of_part(buckets, part, at_least(buckets.widths, width), tree)


def shape_of_part(buckets: Buckets, part: TileGroup, width: int, tree: bool) -> StepShape:
    """Returns the shape of a step whose drafts one of `buckets.verifications` holds."""
    size = part.count * part.width
    max_sampled = size if buckets.trees else verified_sizes(buckets.verifications)[size]
    return StepShape((part,), width, max_sampled, tree=tree)


@functools.cache
def verified_sizes(parts: tuple[TileGroup, ...]) -> dict[int, int]:
    """Returns for each number of tokens of parts the number of computed logits, which takes fewer values: a
    program chooses tokens for all numbers from three quarters of its own number, or up to FEW_TOKENS, on."""
    found: dict[int, int] = {}
    size = 0
    for tokens in sorted({part.count * part.width for part in parts}, reverse=True):
        if (size > FEW_TOKENS and 4 * tokens < 3 * size) or not size:
            size = tokens
        found[tokens] = size
    return found


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
    shape = verification_shape(buckets, len(decodes), most, width, tree=drafts.parents is not None)
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
