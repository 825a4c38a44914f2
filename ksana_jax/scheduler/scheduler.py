"""Iteration-level scheduling (ORCA, OSDI 2022): before every step, which rows compute how many of their tokens.

Knows rows, counts and blocks; no token values beyond stop ids, no jax, no clock. The work left of a row is
num_tokens - num_computed: a whole prompt, a chunk of it, one token of decode and a restart after preemption are the
same thing.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from ksana_jax.kv.block_manager import BlockManager
from ksana_jax.kv.patterns import FAR, LiveRange
from ksana_jax.request import FinishReason
from ksana_jax.scheduler.policies import POLICIES, Policy
from ksana_jax.sequence import Rows, Sequence
from ksana_jax.step import ScheduledBatch


@dataclasses.dataclass
class Progress:
    """What a step brought: rows that got a token, the tokens, and the sequences that ended by it (of `rows[ended]`)."""

    rows: np.ndarray
    tokens: np.ndarray
    ended: np.ndarray
    finished: list[Sequence]


@dataclasses.dataclass
class _Room:
    """What is left of a step."""

    tokens: int
    tiles: int


# Rows are np.intp throughout: NumPy copies index arrays of any other type, which takes longer than using them.
_NO_ROWS = np.zeros(0, np.intp)


class Scheduler:
    """Waiting sequences in the order of a policy, running ones in rows.

    Args:
      blocks: the pool.
      max_num_seqs: most rows.
      max_num_batched_tokens: most tokens of a step.
      query_tile: tokens of one row that share a tile in a step; a step has room for
        ceil(max_num_batched_tokens / query_tile) tiles.
      max_model_len: most tokens of a sequence.
      live: which positions stay visible to later tokens.
      policy: a key of POLICIES.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        query_tile: int,
        max_model_len: int,
        live: LiveRange,
        policy: str = "fcfs",
    ):
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}, must be one of {', '.join(POLICIES)}")
        self.blocks = blocks
        self.policy: Policy = POLICIES[policy]
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.query_tile = query_tile
        self.max_num_tiles = -(-max_num_batched_tokens // query_tile)
        self.max_model_len = max_model_len
        self.num_preemptions = 0
        self.waiting: list[tuple[float, int, Sequence]] = []  # sorted; preempted ones return to their place
        self.order = _NO_ROWS  # running rows, the first to be served first
        self._keys: list[tuple[float, int]] = []  # sort keys of `order`
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.set_live_range(live)

    def set_live_range(self, live: LiveRange) -> None:
        """Changes which positions stay visible. Only while nothing runs or waits."""
        assert not self.has_work, "the attention pattern of running sequences cannot change"
        self.live = live
        width = live.max_live_blocks(self.blocks.block_size, self.max_model_len, self.max_num_batched_tokens)
        self.rows = Rows(self.max_num_seqs, width)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or len(self.order) > 0

    def blocks_to_finish(self, max_len: int) -> int:
        """Blocks without which a sequence that ends at max_len tokens can never finish."""
        # The last token is sampled and never computed.
        return self.live.max_live_blocks(self.blocks.block_size, max(max_len - 1, 1))

    def add(self, seq: Sequence) -> None:
        """Lets a sequence wait for its turn.

        Raises:
          ValueError: it can never fit the pool.
        """
        needed = self.blocks_to_finish(seq.max_len)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"a request of up to {seq.max_len:,} tokens needs {needed:,} KV blocks of {self.blocks.block_size} "
                f"tokens, the pool has {self.blocks.num_blocks:,}"
            )
        bisect.insort(self.waiting, (self.policy(seq), seq.seq_id, seq))

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence in whatever state it is; one that has ended is left alone."""
        if seq.finish_reason is not None:
            return
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if seq.row is None:
            self.waiting = [w for w in self.waiting if w[2] is not seq]
        else:
            self._leave(np.array([seq.row]))

    # ------------------------------------------------------------------ before a step

    def schedule(self) -> ScheduledBatch | None:
        """Chooses what the next step computes and takes the blocks for it; None when there is nothing to do."""
        rows, order = self.rows, self.order
        preempted_before = self.num_preemptions
        left = rows.num_tokens[order] - rows.num_computed[order]
        singles = order[left == 1][: self.max_num_batched_tokens]
        short = rows.num_computed[singles] >= rows.covered[singles]
        if np.count_nonzero(short) <= self.blocks.num_free:
            self._take_blocks(singles[short])
        else:
            singles = self._take_blocks_by_force(singles, short)
        chunks: list[tuple[int, int]] = []
        room = _Room(self.max_num_batched_tokens - len(singles), self.max_num_tiles)
        if len(singles) < len(order):
            for row in order[left > 1].tolist():
                if count := self._extend(row, room):
                    chunks.append((row, count))
        if self.num_preemptions == preempted_before:
            while self.waiting and self._free_rows and room.tokens and room.tiles:
                row, count = self._admit(room)
                if not count:
                    break
                chunks.append((row, count))
        else:
            singles = singles[rows.alive[singles]]
        if not chunks:
            return ScheduledBatch(singles, _NO_ROWS, _NO_ROWS) if len(singles) else None
        alone = [row for row, count in chunks if count == 1]
        longer = np.array([c for c in chunks if c[1] > 1], np.intp).reshape(-1, 2)
        return ScheduledBatch(np.concatenate([singles, np.array(alone, np.intp)]), longer[:, 0], longer[:, 1])

    def _take_blocks(self, rows: np.ndarray, count: int = 1) -> None:
        """Gives `count` blocks to each of some rows; there are enough."""
        if not len(rows):
            return
        r, size = self.rows, self.blocks.block_size
        ids = self.blocks.allocate(len(rows) * count).reshape(len(rows), count)
        at = r.num_blocks[rows][:, None] + np.arange(count, dtype=np.int32)
        r.block_tables[rows[:, None], at] = ids
        r.block_starts[rows[:, None], at] = r.covered[rows][:, None] + size * np.arange(count, dtype=np.int32)
        r.num_blocks[rows] += count
        r.covered[rows] += size * count

    def _take_blocks_by_force(self, singles: np.ndarray, short: np.ndarray) -> np.ndarray:
        """Gives a block to each short row in order, preempting from the end; returns the singles that can run."""
        runs = ~short
        for i in np.flatnonzero(short):
            row = int(singles[i])
            if self.rows.alive[row] and self._make_room(row):
                self._take_blocks(singles[i : i + 1])
                runs[i] = True
        return singles[runs & self.rows.alive[singles]]

    def _make_room(self, row: int) -> bool:
        """Sees to one free block for a row, preempting rows that come after it. False: the row is last and must wait.

        The first row of all always gets its block, so there is progress: a request that the pool cannot hold was
        refused on arrival.
        """
        while not self.blocks.num_free:
            last = int(self.order[-1])
            if last == row:
                return False
            self._preempt(last)
        return True

    def _preempt(self, row: int) -> None:
        """Takes a row's blocks; its sequence waits in its old place and will compute all its tokens again."""
        seq = self.rows.seqs[row]
        assert seq is not None
        self._leave(np.array([row]))
        seq.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, (self.policy(seq), seq.seq_id, seq))

    def _extend(self, row: int, room: _Room) -> int:
        """How many tokens a running row with several left computes now; takes their blocks and their room."""
        if not self.rows.alive[row] or not room.tokens or not room.tiles:
            return 0
        if self.rows.num_computed[row] >= self.rows.covered[row] and not self._make_room(row):
            return 0
        return self._take(row, room)

    def _take(self, row: int, room: _Room) -> int:
        r, size = self.rows, self.blocks.block_size
        done, covered = int(r.num_computed[row]), int(r.covered[row])
        count = min(int(r.num_tokens[row]) - done, room.tokens, room.tiles * self.query_tile)
        count = min(count, covered + self.blocks.num_free * size - done)
        if new := -(-max(done + count - covered, 0) // size):
            self._take_blocks(np.array([row]), new)
        room.tokens -= count
        room.tiles -= -(-count // self.query_tile) if count > 1 else 0
        return count

    def _admit(self, room: _Room) -> tuple[int, int]:
        """Places the first waiting sequence in a row if its first chunk fits: the row and its tokens, or 0 tokens."""
        seq = self.waiting[0][2]
        count = min(len(seq.token_ids), room.tokens, room.tiles * self.query_tile)
        fits = -(-count // self.blocks.block_size) <= self.blocks.num_free
        # When nothing runs, part of a chunk is better than waiting for ever.
        if not fits and (len(self.order) or not self.blocks.num_free):
            return -1, 0
        key = self.waiting.pop(0)[:2]
        row = self._free_rows.pop()
        self.rows.place(seq, row)
        at = bisect.bisect(self._keys, key)
        self._keys.insert(at, key)
        self.order = np.insert(self.order, at, row)
        return row, self._take(row, room)

    # ------------------------------------------------------------------ after a step

    def update(self, batch: ScheduledBatch, tokens: np.ndarray) -> Progress:
        """Books a step: tokens appended, blocks that nobody will see returned, ended sequences taken out.

        Args:
          tokens: for each of `batch.rows`, the token sampled after its last computed one; ignored where the row has
            more to compute.
        """
        r, rows = self.rows, batch.rows
        r.num_computed[rows] += batch.num_per_row
        complete = r.num_computed[rows] == r.num_tokens[rows]
        sampled = rows
        if not complete.all():
            sampled, tokens = rows[complete], tokens[complete]
        length = r.append(sampled, tokens)
        stopped = (r.stop_ids.take(sampled, axis=0) == tokens[:, None]).any(axis=1) & (length > r.min_len[sampled])
        ended = stopped | (length >= r.max_len[sampled])
        finished: list[Sequence] = []
        if ended.any():
            for row, token, by_id in zip(sampled[ended], tokens[ended], stopped[ended], strict=True):
                seq = r.seqs[row]
                assert seq is not None
                seq.finish_reason = FinishReason.STOP if by_id else FinishReason.LENGTH
                seq.stop_reason = int(token) if by_id else None
                finished.append(seq)
            self._leave(sampled[ended])
            rows = rows[r.alive[rows]]
        self._return_invisible_blocks(rows)
        return Progress(sampled, tokens, ended, finished)

    def _return_invisible_blocks(self, rows: np.ndarray) -> None:
        """Returns blocks of which no later query of their row sees a token."""
        if self.live.window is None:
            return
        r, size = self.rows, self.blocks.block_size
        # Block size 4, window 4: block 0..3 leaves the window of query 7, block 4..7 that of query 11.
        seen_from = r.num_computed[rows] - self.live.window + 1
        due = seen_from >= r.return_at[rows]
        if not due.any():
            return
        rows = rows[due]
        r.return_at[rows] = (seen_from[due] // size + 1) * size
        width = int(r.num_blocks[rows].max())
        starts = r.block_starts[rows, :width]
        dead = self.live.dead_blocks(starts, size, r.num_computed[rows][:, None])
        some = dead.any(axis=1)
        if not some.any():
            return
        rows, dead = rows[some], dead[some]
        tables = r.block_tables[rows, :width]
        self.blocks.release(tables[dead])
        order = np.argsort(dead, axis=1, kind="stable")  # the living move up
        r.block_tables[rows, :width] = np.take_along_axis(tables, order, axis=1)
        r.block_starts[rows, :width] = np.take_along_axis(np.where(dead, FAR, starts[some]), order, axis=1)
        r.num_blocks[rows] -= dead.sum(axis=1, dtype=np.int32)

    def _leave(self, leaving: np.ndarray) -> None:
        """Takes rows out, their blocks back."""
        r = self.rows
        self.blocks.release(np.concatenate([r.held(row) for row in leaving]))
        stays = ~np.isin(self.order, leaving)
        self._keys = [key for key, kept in zip(self._keys, stays, strict=True) if kept]
        self.order = self.order[stays]
        for row in leaving.tolist():
            r.clear(row)
            self._free_rows.append(row)

    def check(self) -> None:
        """Holds the books against the rows.

        Raises:
          AssertionError: see `BlockManager.check`; or a row's tables do not cover what it has computed.
        """
        r = self.rows
        order = self.order.tolist()
        self.blocks.check(r.held(row) for row in order)
        assert len(order) + len(self._free_rows) == self.max_num_seqs
        assert set(np.flatnonzero(r.alive).tolist()) == set(order)
        for row in order:
            starts = r.block_starts[row, : r.num_blocks[row]]
            assert (np.diff(starts) > 0).all(), "blocks are out of order"
            assert r.num_computed[row] <= r.covered[row], "computed tokens without a block"
            positions = np.arange(0, r.covered[row], self.blocks.block_size)
            alive = ~self.live.dead_blocks(positions, self.blocks.block_size, r.num_computed[row])
            assert np.isin(positions[alive], starts).all(), "a visible block was returned"
