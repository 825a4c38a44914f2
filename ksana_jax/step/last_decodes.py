"""The arrays of a decode step from those of the one before it, if the same rows decode. NumPy only."""

from __future__ import annotations

import functools

import numpy as np

from ksana_jax.sequence import Rows
from ksana_jax.step.contract import ScheduledBatch, StepArrays, StepInput


class LastDecodes:
    """The decode step that was built last, without shared blocks.

    In the next step of the same rows, positions and slots are one further. Block tables are taken over, and new blocks
    enter them in place: an earlier step that still uses them may see that there are blocks after all its tokens, but
    nothing of what they hold.

    Args:
      decodes: its rows; the same array, not an equal one, stands for the same sequences in them.
      step, ends: see `BatchBuilder.build`.
    """

    def __init__(self, decodes: np.ndarray, rows: Rows, step: StepInput, ends: np.ndarray, block_size: int):
        self.decodes, self.rows, self.step, self.ends = decodes, rows, step, ends
        self._num_rewrites, self._block_size = rows.num_rewrites, block_size

    def goes_on(self, batch: ScheduledBatch, rows: Rows) -> bool:
        """Whether a step is the next one of the same rows, and its new blocks fit into the tables."""
        if batch.decodes is not self.decodes or rows is not self.rows or rows.num_rewrites != self._num_rewrites:
            return False
        if len(batch.chunks) or batch.drafts is not None:
            return False
        return batch.new is None or int(np.maximum.reduce(batch.new.entries)) < self.step.shape.table_width

    def advance(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepInput, np.ndarray]:
        """Returns what `BatchBuilder.build` does for a step that `goes_on`."""
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
            sampling = sampling._replace(num_outputs=sampling.num_outputs + real[: step.num_sampled])
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
        """Where the table and the token of each row begin in the flat arrays of all groups: [Gk * R] each."""
        shape, groups = self.step.shape, np.arange(self.rows.num_groups)[:, None]
        places = np.zeros(len(self.rows.seqs), np.intp)
        places[self.decodes] = np.arange(len(self.decodes))
        tiles, tokens = groups * shape.num_tiles + places, groups * shape.num_tokens + places
        return (tiles * shape.table_width).reshape(-1), tokens.reshape(-1)
