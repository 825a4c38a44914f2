"""Arrays of a step's tokens and blocks for features that few engines use. No jax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.types import Array, ScheduledBatch, StepShape, padded


def numbering(method: EvictionMethod | SelectionMethod | None) -> dict[str, Callable[..., Any]]:
    """Returns the entry of `BatchBuilder.additions` of a method that numbers queries; none for None."""
    return {} if method is None else {"query_numbers": functools.partial(query_numbers, method)}


def query_numbers(
    method: EvictionMethod | SelectionMethod, shape: StepShape, batch: ScheduledBatch, rows: Rows, ends: np.ndarray
) -> np.ndarray:
    """Returns the method's number for each token of a step: [Gk, T]; 0 for padding.

    ends: index in [0, T) of the last token of each of `batch.rows`.
    """
    counts = batch.num_per_row
    row, nth = np.repeat(batch.rows, counts), _nth(counts)
    position = rows.num_computed[row] + nth
    until = rows.evict_at.take(row, axis=1) - position
    if isinstance(method, EvictionMethod) and method.probes:
        until = np.where([one in rows.probes for one in row.tolist()], until, FAR)
    found = np.zeros((rows.num_groups, shape.num_tokens), np.float32)
    found[:, np.repeat(ends + 1 - counts, counts) + nth] = method.query_numbers(
        until, position + 1 - rows.num_prompt[row]
    )
    return found


def adapter_slots(shape: StepShape, batch: ScheduledBatch, rows: Rows, ends: np.ndarray) -> np.ndarray:
    """Returns the slot of each token's adapter: int32 [T], -1 for none and for padding; ends as in `query_numbers`."""
    of_row = np.full(len(ends), -1, np.int32)
    for at, row in enumerate(batch.rows.tolist()):
        if (seq := rows.seqs[row]) is not None and seq.adapter is not None:
            of_row[at] = seq.adapter.slots.used(seq.adapter.digest)
    return of_tokens(of_row, shape, batch, ends)


class StateArrays(NamedTuple):
    """The states of a step's texts in recurrent layers, as padded int32 arrays; R is `StepShape.num_texts`.

    A chunk with a snapshot in it is two texts: the second one reads the slot that the one before it writes.

    of_texts: [4, R] the slots that each text's state is read from and written to, the index in [0, T) of its last
    token, and the slot that the verification of its drafts writes to. A slot that does not exist, such as FAR, stands
    for zeros, and is not written to.
    of_tokens: [2, T] index in [0, R) of each token's text, FAR for padding, and number of its tokens before it in the
    step.
    """

    of_texts: Array
    of_tokens: Array


def states(shape: StepShape, batch: ScheduledBatch, rows: Rows, ends: np.ndarray) -> StateArrays:
    """Returns where the states of a step's texts are, two for rows with a `Rows.state_via`; ends as above."""
    counts, source, target = batch.num_per_row, rows.state_from[batch.rows], rows.state_to[batch.rows]
    if len(batch.chunks) and len(cut := np.flatnonzero(rows.state_via[batch.rows] < FAR)):
        via, here = rows.state_via[batch.rows[cut]], batch.rows[cut]
        before = rows.cache_at[here] - rows.num_computed[here]
        after = counts[cut] - before
        source, target = np.insert(source, cut + 1, via), np.insert(target, cut, via)
        ends, counts = np.insert(ends, cut, ends[cut] - after), np.insert(counts, cut, before)
        counts[cut + np.arange(1, len(cut) + 1)] = after
    of_texts = np.full((4, shape.num_texts), FAR, np.int32)
    of_texts[2] = 0
    written = 1 if batch.drafts is None else 3
    of_texts[[0, 2, written], : len(ends)] = source, ends, target
    nth, of_tokens_ = _nth(counts), np.zeros((2, shape.num_tokens), np.int32)
    of_tokens_[0] = FAR
    of_tokens_[:, np.repeat(ends + 1 - counts, counts) + nth] = np.repeat(np.arange(len(ends)), counts), nth
    return StateArrays(of_texts, of_tokens_)


def of_tokens(of_rows: np.ndarray, shape: StepShape, batch: ScheduledBatch, ends: np.ndarray) -> np.ndarray:
    """Returns the number of each token's row: int32 [T], -1 for padding; ends as in `query_numbers`."""
    found, counts = np.full(shape.num_tokens, -1, np.int32), batch.num_per_row
    found[np.repeat(ends + 1 - counts, counts) + _nth(counts)] = np.repeat(of_rows, counts)
    return found


def full_blocks(
    block_size: int, num_blocks: int, shape: StepShape, batch: ScheduledBatch, rows: Rows, ends: np.ndarray
) -> np.ndarray:
    """Returns the blocks [Gk, F] that a step fills; see `StepArrays`."""
    size, computed = block_size, rows.num_computed[batch.rows]
    first, counts = computed // size, (computed + batch.num_per_row) // size - computed // size
    row = np.repeat(batch.rows, counts)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    # The newest blocks of a row are adjacent at the end of its tables.
    from_end = rows.allocated_until[row] // size - (np.repeat(first, counts) + nth)
    groups = np.arange(rows.num_groups)[:, None]
    found = rows.block_tables[groups, row, rows.num_blocks[:, row] - from_end]
    return padded(found, (rows.num_groups, shape.most_full(size)), num_blocks)


def _nth(counts: np.ndarray) -> np.ndarray:
    """Returns the place of each token among the tokens of its row in the step."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
