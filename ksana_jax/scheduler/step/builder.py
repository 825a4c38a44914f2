"""Turns scheduled steps into padded arrays; decodes of the same rows follow from the previous step. No jax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.step.buckets import Buckets
from ksana_jax.scheduler.step.masks import masks_for
from ksana_jax.scheduler.step.sampling import add_settings
from ksana_jax.scheduler.step.shared_prefix import sharing_decodes
from ksana_jax.scheduler.step.types import ScheduledBatch, StepArrays, StepInput, StepShape, padded
from ksana_jax.scheduler.step.verification import verification

_NO_TOKENS = np.zeros(0, np.int32)


def _tables_of(tables: np.ndarray, rows: np.ndarray, width: int) -> np.ndarray:
    """Returns tables[:, rows, :width]; most of the rows are taken in half the time of an index."""
    if 2 * len(rows) > tables.shape[1]:
        return tables[:, :, :width].take(rows, axis=1)
    return np.ascontiguousarray(tables[:, rows, :width])


@dataclasses.dataclass(eq=False)
class BatchBuilder:
    """Turns scheduled steps into arrays.

    A decode step of the same rows as the previous step takes over its block tables, and new blocks enter them in place.
    A step under way may thus gain blocks that begin after all its tokens, which do not attend to them. Any other change
    of tables makes new arrays.

    Args:
      block_size, num_blocks: of the pool. vocab_size: of the model, for penalties and biases.
      sink_width: leading entries of a block table that are never shared: they can hold repositioned sinks.
      min_saved_tokens: reads of tokens that sharing must spare in a group of rows.
      residual_groups: groups of layers with exact tokens next to a block codec's codes; None without one.
      acceptance: rule by which draft tokens are accepted.
      additions: further arrays of `StepArrays` by name, functions (shape, batch, rows, ends) of `per_token`.
      steer: adds arrays to a step with steered rows, see `methods.steering`.
    """

    buckets: Buckets
    block_size: int
    num_blocks: int
    vocab_size: int
    sink_width: int = 0
    min_saved_tokens: int = 256
    residual_groups: tuple[int, ...] | None = None
    acceptance: str = "sampled"
    additions: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    steer: Any = None
    _last: LastDecodes | None = dataclasses.field(default=None, init=False)

    def build(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepInput, np.ndarray]:
        """Returns a scheduled step as the input of an executor.

        Returns:
          The step, and for each of `batch.rows` the index in [0, T) of the last of its tokens that are computed.
        """
        if self._last is not None and self._last.goes_on(batch, rows):
            step, ends = self._last.advance(batch, rows)
        else:
            step, ends = self._build(batch, rows)
            self._keep(batch, rows, step, ends)
        if rows.settings.matchers:
            step.mask = masks_for(step, batch.sampled, rows, self.vocab_size)
        for name, of_step in self.additions.items():
            step.arrays = step.arrays._replace(**{name: of_step(step.shape, batch, rows, ends)})
        if rows.num_steered:
            self.steer(step, batch, rows, ends)
        return step, ends

    def _keep(self, batch: ScheduledBatch, rows: Rows, step: StepInput, ends: np.ndarray) -> None:
        """Keeps a step from which the next one may follow."""
        may_share = self.buckets.shared_rows and len(batch.decodes) > 1
        follows = not (len(batch.chunks) or may_share or rows.settings.num_dense or batch.drafts is not None)
        self._last = LastDecodes(batch.decodes, rows, step, ends, self.block_size) if follows else None

    def _build(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepInput, np.ndarray]:
        """Returns the same as `build`, from the rows alone."""
        if batch.drafts is not None:
            of_pool = self.block_size, self.num_blocks
            step, ends = verification(batch, batch.drafts, rows, self.buckets, *of_pool, self.acceptance)
            if rows.settings.num_asking:
                add_settings(step, batch, rows, ends, self.vocab_size)
            return step, ends
        decodes, chunks = batch.decodes, batch.chunks
        shared = None
        if self.buckets.shared_rows and len(decodes) > 1:
            shared = self.sharing_decodes(batch, rows)
        if shared is not None:
            shape, arrays, ends = shared
        else:
            width = int(np.maximum.reduce(rows.num_blocks.take(batch.rows, axis=1), axis=None))
            shape, ends = self.buckets.shape(len(decodes), batch.counts, width), np.arange(len(decodes), dtype=np.int32)
            arrays = self.with_decodes(shape, decodes, rows)
        if len(chunks):
            ends = np.append(ends, self._put_chunks(shape, arrays, batch, rows))
        sampled = ends if batch.samples is None else ends[batch.samples]
        arrays = arrays._replace(sampled=padded(sampled, (shape.max_sampled,), 0))
        # Padding is at -1.
        num_attended = int(np.add.reduce(arrays.cache_positions, axis=None)) // rows.num_groups + shape.num_tokens
        step = StepInput(shape, arrays, self.buckets.num_sampled(len(sampled)), num_attended)
        if rows.settings.num_asking:
            add_settings(step, batch, rows, ends, self.vocab_size)
        return step, ends

    def sharing_decodes(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepShape, StepArrays, np.ndarray] | None:
        """Returns the decodes of a step that shares leading blocks; see `shared_prefix.sharing_decodes`."""
        least = self.min_saved_tokens // self.block_size
        return sharing_decodes(
            batch, rows, self.buckets, self.with_decodes, self.sink_width, least, self.residual_groups
        )

    def with_decodes(self, shape: StepShape, decodes: np.ndarray, rows: Rows) -> StepArrays:
        """Returns the arrays of a step with its decodes filled in; the rest is padding."""
        tokens, groups, width = shape.num_tokens, rows.num_groups, shape.table_width
        tables = groups, shape.num_tiles, width
        at, newest_token = rows.num_computed[decodes], rows.newest[decodes]
        if np.count_nonzero(cut := at + 1 < rows.num_tokens[decodes]):  # chunks of one token
            newest_token[cut] = [rows.probes.get(row, rows.token_ids[row])[i] for row, i in zip(decodes[cut], at[cut])]
        # A decode is the newest token of its row: it is in the row's last block.
        last = rows.num_blocks.take(decodes, axis=1) - 1
        tables_of = np.arange(groups)[:, None] * len(rows.seqs) + decodes
        newest = rows.block_tables.reshape(-1).take(tables_of * rows.block_tables.shape[2] + last)
        cached_at = at[None] - rows.num_evicted.take(decodes, axis=1)
        slots = newest * self.block_size + cached_at % self.block_size
        return StepArrays(
            tokens=padded(newest_token, (tokens,), 0),
            positions=padded(at, (tokens,), -1),
            cache_positions=padded(cached_at, (groups, tokens), -1),
            slots=padded(slots, (groups, tokens), self.num_blocks * self.block_size),
            block_tables=padded(_tables_of(rows.block_tables, decodes, width), tables, 0),
            block_starts=padded(_tables_of(rows.block_starts, decodes, width), tables, FAR),
            sampled=_NO_TOKENS,
        )

    def _put_chunks(self, shape: StepShape, arrays: StepArrays, batch: ScheduledBatch, rows: Rows) -> np.ndarray:
        """Writes longer chunks into the tiles of the last part; returns the index of each one's last token."""
        *_, ((_, size), tokens, tiles) = shape.places()
        tile, ends = 0, []
        for row, count in zip(batch.chunks.tolist(), batch.counts.tolist(), strict=True):
            token, next_tile = tokens.start + tile * size, tile - (-count // size)
            self._put_chunk(arrays, rows, row, token, count, slice(tiles.start + tile, tiles.start + next_tile))
            ends.append(token + count - 1)
            tile = next_tile
        return np.array(ends, np.int32)

    def _put_chunk(self, arrays: StepArrays, rows: Rows, row: int, token: int, count: int, tiles: slice) -> None:
        start = int(rows.num_computed[row])
        here = slice(token, token + count)
        positions = np.arange(start, start + count, dtype=np.int32)
        arrays.tokens[here] = (rows.probes[row] if row in rows.probes else rows.token_ids[row])[start : start + count]
        arrays.positions[here] = positions
        for group, width in enumerate(rows.num_blocks[:, row].tolist()):
            table, starts = rows.block_tables[group, row], rows.block_starts[group, row]
            cached_at = positions - rows.num_evicted[group, row]
            block = np.searchsorted(starts, cached_at, side="right") - 1
            arrays.cache_positions[group, here] = cached_at
            arrays.slots[group, here] = table[block] * self.block_size + cached_at % self.block_size
            arrays.block_tables[group, tiles, :width] = table[:width]
            arrays.block_starts[group, tiles, :width] = starts[:width]


class LastDecodes:
    """The decode step that was built last, without shared blocks.

    In the next step of the same rows, positions and slots are one further. Block tables are taken over, and new blocks
    enter them in place: an earlier step that still uses them may find blocks after its tokens, not their content.

    Args:
      decodes: its rows; only this array, not an equal one, means the same sequences in them.
      step, ends: see `BatchBuilder.build`.
    """

    def __init__(self, decodes: np.ndarray, rows: Rows, step: StepInput, ends: np.ndarray, block_size: int):
        self.decodes, self.rows, self.step, self.ends = decodes, rows, step, ends
        self._num_rewrites, self._block_size = rows.num_rewrites, block_size

    def goes_on(self, batch: ScheduledBatch, rows: Rows) -> bool:
        """True if a step is the next one of the same rows, and its new blocks fit into the tables."""
        if batch.decodes is not self.decodes or rows is not self.rows or rows.num_rewrites != self._num_rewrites:
            return False
        if len(batch.chunks) or batch.drafts is not None:
            return False
        return batch.new is None or int(np.maximum.reduce(batch.new.entries)) < self.step.shape.table_width

    def advance(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepInput, np.ndarray]:
        """Returns the same as `BatchBuilder.build`, for a step that `goes_on`."""
        step, groups, real = self.step, rows.num_groups, self._real
        a, sampling = step.arrays, step.sampling
        self._numbers = numbers = self._numbers + real
        cache_positions, slots = numbers[1 : 1 + groups], numbers[1 + groups :]
        if (new := batch.new) is not None:
            table_at, token_at = self._places
            at = table_at[new.of_group] + new.entries
            a.block_tables.reshape(-1)[at], a.block_starts.reshape(-1)[at] = new.ids, new.starts
            slots.reshape(-1)[token_at[new.of_group]] = new.ids * self._block_size
        tokens = rows.newest[batch.decodes]
        if len(tokens) < len(real):
            tokens = np.append(tokens, np.zeros(len(real) - len(tokens), np.int32))
        arrays = StepArrays(tokens, numbers[0], cache_positions, slots, a.block_tables, a.block_starts, a.sampled)
        if sampling is not None:
            sampling = rows.settings.advanced(sampling, batch.decodes, real)
        num_attended = step.num_attended + len(self.decodes)
        self.step = StepInput(step.shape, arrays, step.num_sampled, num_attended, sampling, step.num_logprobs)
        return self.step, self.ends

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        """Positions, cache positions and slots: [1 + 2 Gk, T], one array so that they advance at once."""
        a = self.step.arrays
        return np.concatenate([a.positions[None], a.cache_positions, a.slots])

    @functools.cached_property
    def _real(self) -> np.ndarray:
        """[T] 1 for decodes, 0 for padding."""
        return (self.step.arrays.positions >= 0).astype(np.int32)

    @functools.cached_property
    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Indices at which each row's table and token begin in the flat arrays of all groups: [Gk * R] each."""
        shape, groups = self.step.shape, np.arange(self.rows.num_groups)[:, None]
        places = np.zeros(len(self.rows.seqs), np.intp)
        places[self.decodes] = np.arange(len(self.decodes))
        tiles, tokens = groups * shape.num_tiles + places, groups * shape.num_tokens + places
        return (tiles * shape.table_width).reshape(-1), tokens.reshape(-1)
