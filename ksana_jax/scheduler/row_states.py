"""States of running rows: the slot that a row reads in its next step, the one that it writes, and snapshots.

Both are the same slot until the state becomes a snapshot, or if the row begins with one: then its next step writes to
another slot.
"""

from __future__ import annotations

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.core.request import FinishReason
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.state_slots import StateSlots
from ksana_jax.kv.state_snapshots.base import SnapshotPolicy
from ksana_jax.kv.tier import Node
from ksana_jax.scheduler.sequence import Rows


class RowStates:
    """Fills `Rows.state_from` and `Rows.state_to`.

    A row owns both of its slots. There are always two left for each free row (`num_slots`): snapshots are taken only
    while others are left.

    Args:
      policy: decides where snapshots are taken; None takes none.
    """

    @classmethod
    def of(cls, rows: Rows, memory: KVMemory, policy: SnapshotPolicy | None) -> RowStates | None:
        """Returns the states of rows; None in a model without recurrent layers."""
        return None if memory.states is None else cls(rows, memory, memory.states, policy)

    def __init__(self, rows: Rows, memory: KVMemory, slots: StateSlots, policy: SnapshotPolicy | None):
        self._rows, self._slots, self._policy = rows, slots, policy
        self._prefixes, self._size = memory.prefixes, memory.block_size
        self._pending: dict[int, list[tuple[int, int]]] = {}  # tokens and slot of snapshots, until tokens are known

    @property
    def _has_spare(self) -> bool:
        """True if a slot is left besides those for free rows."""
        return bool(self._slots.pool.num_available > 2 * np.count_nonzero(~self._rows.alive))

    def place(self, row: int, node: Node | None) -> None:
        """Gives a sequence that starts its slots.

        Args:
          node: a pinned snapshot that it begins with; None for no state.
        """
        r = self._rows
        r.state_from[row] = FAR if node is None else self._slots.claim(node)
        r.state_to[row] = self._slots.take()
        self._plan(row)
        self._expect(row)

    def _plan(self, row: int) -> None:
        r, seq, size = self._rows, self._rows.seqs[row], self._size
        assert seq is not None
        num_prompt = (seq.num_prompt - 1) // size
        done = int(r.num_computed[row]) // size
        policy = self._policy if self._prefixes.enabled else None
        at = None if policy is None else policy.next_block(done, num_prompt)
        r.snapshot_at[row] = FAR if at is None or at <= done else at * size

    def _expect(self, row: int) -> None:
        """Lets other prompts wait for the next snapshot of a row, if its tokens are known."""
        r, seq = self._rows, self._rows.seqs[row]
        assert seq is not None
        if r.snapshot_at[row] < seq.num_prompt:
            self._prefixes.expect_state(seq.kv, r.token_ids[row], int(r.snapshot_at[row]) // self._size)
        else:
            self._prefixes.expect_no_more(seq.kv)

    def advance(self, rows: np.ndarray) -> None:
        """Records that a step has written the states of some rows, and takes the snapshots that are due."""
        r = self._rows
        moved = rows[r.state_from[rows] != r.state_to[rows]]
        for slot in r.state_from[moved].tolist():
            if slot != FAR:
                self._slots.give_back(slot)
        r.state_from[rows] = r.state_to[rows]
        for row in rows[r.num_computed[rows] == r.snapshot_at[rows]].tolist():
            spare, slot = self._has_spare, int(r.state_to[row])
            if spare:
                self._slots.share(slot)
                self._pending.setdefault(row, []).append((int(r.num_computed[row]), slot))
                r.state_to[row] = self._slots.take()
            self._plan(row)
            if not spare:
                self._expect(row)

    def index(self) -> None:
        """Caches the snapshots whose tokens are known."""
        for row in list(self._pending):
            self._index(row)

    def _index(self, row: int) -> None:
        r, seq, waits = self._rows, self._rows.seqs[row], []
        assert seq is not None
        for num_tokens, slot in self._pending.pop(row):
            if num_tokens >= r.num_known[row]:
                waits.append((num_tokens, slot))
                continue
            if seq.kv.cacheable:
                self._slots.keep(seq.kv, r.token_ids[row], num_tokens, slot)
            self._slots.give_back(slot)
        if waits:
            self._pending[row] = waits
        else:
            self._expect(row)

    def leave(self, rows: np.ndarray) -> None:
        """Takes the slots of rows that end. Snapshots of tokens that are known stay."""
        r = self._rows
        for row in rows.tolist():
            seq = r.seqs[row]
            assert seq is not None
            if row in self._pending and seq.finish_reason is not FinishReason.ERROR:
                self._index(row)
            held = {int(r.state_from[row]), int(r.state_to[row])} - {FAR}
            for slot in [*held, *(slot for _, slot in self._pending.pop(row, []))]:
                self._slots.give_back(slot)
            r.state_from[row] = r.state_to[row] = FAR

    def check(self) -> None:
        """Checks the slots that rows own against the pool's counts.

        Raises:
          AssertionError: they disagree, see `BlockManager.check` and `Tier.check`.
        """
        r = self._rows
        pairs = zip(r.state_from[r.alive].tolist(), r.state_to[r.alive].tolist(), strict=True)
        held = [slot for pair in pairs for slot in {*pair} - {FAR}]
        held += [slot for found in self._pending.values() for _, slot in found]
        self._slots.pool.check([np.array(held, np.int32)])
        self._slots.check()
        assert self._slots.pool.num_available >= np.count_nonzero(~r.alive)
