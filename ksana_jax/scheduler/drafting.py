"""Drafts of a step's decodes: their maximum length, their blocks, and the tokens accepted from them."""

from __future__ import annotations

import dataclasses

import numpy as np

from ksana_jax.scheduler.row_blocks import RowBlocks
from ksana_jax.scheduler.row_returns import trim
from ksana_jax.scheduler.row_states import RowStates
from ksana_jax.scheduler.speculative.speculation import Speculation
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.masks import constrained
from ksana_jax.scheduler.step.types import ScheduledBatch


@dataclasses.dataclass(frozen=True)
class Drafting:
    """Drafts for rows, with blocks in the tables of `row_blocks`.

    Draft tokens are in no sequence and in no prefix index. Their keys and values are in slots of the row that its next
    tokens write to before anything reads them.

    Args:
      longest_step: maximum tokens of a step. states: of recurrent layers; None without.
    """

    row_blocks: RowBlocks
    speculation: Speculation
    longest_step: int
    states: RowStates | None = None

    def draft(self, decodes: np.ndarray) -> Drafts | None:
        """Returns drafts for decodes that have a block for one token each; None without any.

        Beams are chosen by scores, step by step: with beams no row has drafts.
        """
        r, count = self.row_blocks.rows, len(decodes)
        in_step = min(self.speculation.most_at(decodes), self.longest_step // count - 1)
        if in_step < 1 or r.num_beams:
            return None
        # The last token of a sequence is never computed, and rows evict between steps.
        until = np.minimum(r.max_len[decodes] - 1, r.evict_at.take(decodes, axis=1).min(axis=0))
        if self.states is not None:  # of which snapshots are taken between steps too
            until = np.minimum(until, r.snapshot_at[decodes])
        most = np.clip(until - r.num_computed[decodes] - 1, 0, in_step)
        # The last token of a prompt, with its other tokens cached, need not be the sequence's last.
        most[r.num_computed[decodes] + 1 < r.num_tokens[decodes]] = 0
        if self.speculation.needs_blocks:
            most = self._provide(decodes, most)
        drafts = self.speculation.draft(r, decodes, most)
        if r.settings.matchers:  # a draft model has no blocks for other tokens than its own
            drafts = constrained(r, decodes, most, drafts, forces=not self.speculation.needs_blocks)
        if self.speculation.needs_blocks:
            trim(self.row_blocks, decodes, 1 + (0 if drafts is None else drafts.counts))
        elif drafts is not None:
            drafts = drafts.shortened(self._provide(decodes, drafts.counts))
        return drafts if drafts is not None and np.count_nonzero(drafts.counts) else None

    def _provide(self, decodes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Provides rows that have blocks for one token with blocks for draft tokens.

        Args:
          counts: [decodes] draft tokens of each row.

        Returns:
          Number of them that have blocks: fewer if the pool has none left, since a guess must not preempt.
        """
        r, counts = self.row_blocks.rows, counts.copy()
        until = r.num_computed[decodes] + 1 + counts
        for place in (until > r.allocated_until[decodes]).nonzero()[0].tolist():
            counts[place] = self.row_blocks.extend(int(decodes[place]), 1 + int(counts[place])) - 1
        return counts

    def keep_up(self, rows: np.ndarray, running: np.ndarray) -> None:
        """Lets the proposer follow a step with chunks of rows [n], before blocks that left their windows are returned.

        Args:
          running: all running rows; if these have no drafts, the proposer reads the remaining tokens once they do.
        """
        if self.row_blocks.windowed and not self.row_blocks.rows.num_beams and self.speculation.most_at(running):
            self.speculation.keep_up(self.row_blocks.rows, rows)

    def append(
        self, batch: ScheduledBatch, tokens: np.ndarray, num_accepted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Appends a step's tokens after `Scheduler.advance`, up to the end of each sequence, and returns the blocks
        of rejected tokens.

        Args:
          tokens: [n, w] sampled for each row and its draft tokens. num_accepted: [n] number of accepted drafts.

        Returns:
          For each row the newest token, -1 if the model's scores were not finite; and the number of its new tokens.
        """
        r, rows = self.row_blocks.rows, batch.decodes
        assert batch.drafts is not None
        self.speculation.settle(rows, batch.drafts, num_accepted)
        at, nth = np.arange(len(rows)), np.arange(tokens.shape[1])
        newest = tokens[at, num_accepted]
        counts = num_accepted + (newest >= 0)
        length = r.num_known[rows, None] + nth + 1
        is_stop = (tokens[:, :, None] == r.stop_ids[rows, None]).any(axis=2) & (length > r.min_len[rows, None])
        ends = (is_stop | (length >= r.max_len[rows, None])) & (nth < counts[:, None])
        first = ends.argmax(axis=1)
        ended = ends[at, first]
        newest, counts = np.where(ended, tokens[at, first], newest), np.where(ended, first + 1, counts)
        r.append_several(rows, tokens, counts)
        r.num_computed[rows] += num_accepted  # and one that `advance` has counted
        if self.states is not None:
            self.states.advance(rows)
        trim(self.row_blocks, rows)
        self.row_blocks.num_ahead = 0
        return newest, counts
