"""States of running rows: the slot that a row reads in its next step, the one that it writes, and snapshots.

Both are the same slot until the state becomes a snapshot, or if the row begins with one: then its next step writes to
another slot. A chunk that passes the end of a block whose state is cached writes that state too, to a third slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.core.request import FinishReason
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import check_states
from ksana_jax.kv.prefix_cache import Hit
from ksana_jax.kv.state import KVState
from ksana_jax.kv.state_slots import StateSlots
from ksana_jax.kv.state_snapshots.base import SnapshotPolicy
from ksana_jax.kv.tier import DEVICE
from ksana_jax.scheduler.sequence import Rows


class RowStates:
    """Fills `Rows.cache_at`, `Rows.state_from`, `Rows.state_to` and `Rows.state_via`.

    A row owns its slots. Snapshots and forks are made only while two are left for each free row.

    Args:
      policy: decides where snapshots are taken; None takes none.
    """

    @classmethod
    def of(cls, rows: Rows, memory: KVMemory, policy: SnapshotPolicy | None) -> RowStates | None:
        """Returns the states of rows; None in a model without recurrent layers."""
        return None if memory.states is None else cls(rows, memory, memory.states, policy)

    def __init__(self, rows: Rows, memory: KVMemory, slots: StateSlots, policy: SnapshotPolicy | None):
        self._rows, self._slots, self._policy = rows, slots, policy
        self._memory, self._prefixes, self._size = memory, memory.prefixes, memory.block_size
        self._for_forks: dict[int, int] = {}  # slots of states before the last tokens of prompts
        self._pending: dict[int, list[tuple[int, int]]] = {}  # tokens and slot of snapshots, until tokens are known

    @property
    def _num_spare(self) -> int:
        """Number of slots that are left besides those for free rows."""
        return self._slots.pool.num_available - 2 * int(np.count_nonzero(~self._rows.alive))

    def fits(self, hit: Hit | None) -> bool:
        """True if there are slots for a sequence that starts; hit: its cached prefix, pinned."""
        loads = hit is not None and hit.state is not None and hit.state.at[DEVICE] < 0
        return self._slots.pool.num_available > loads

    def place(self, row: int, slot: int) -> None:
        """Gives a sequence that starts its slots.

        Args:
          slot: of the state that it begins with, which the row owns from now on; FAR for no state.
        """
        r = self._rows
        r.state_from[row] = r.state_to[row] = slot
        if slot == FAR or self._slots.is_shared(np.array([slot]))[0]:
            r.state_to[row] = self._slots.take()
        self._hold(row)
        self._plan(row)
        self._expect(row)

    def _plan(self, row: int) -> None:
        r, seq = self._rows, self._rows.seqs[row]
        assert seq is not None
        r.cache_at[row] = at = self._next(row, int(r.num_computed[row]))
        last = seq.num_prompt - 1
        held = last if seq.forks and r.num_computed[row] < last else FAR
        passes = at < min(held, r.num_tokens[row])
        r.snapshot_at[row] = min(self._next(row, at) if passes else at, held)

    def _next(self, row: int, num_tokens: int) -> int:
        """Returns the least number of a row's tokens above num_tokens after which its state is cached; FAR for none."""
        seq, size, policy = self._rows.seqs[row], self._size, self._policy
        if policy is None or not self._prefixes.enabled:
            return FAR
        assert seq is not None
        done, num_prompt = num_tokens // size, (seq.num_prompt - 1) // size
        found = policy.next_block(done, num_prompt), self._fork(row)
        return min((at * size for at in found if at is not None and at > done), default=FAR)

    def _fork(self, row: int) -> int | None:
        """Returns the blocks of a row's prompt whose keys and values were cached, if its state after them is due."""
        seq = self._rows.seqs[row]
        assert seq is not None and self._policy is not None
        return seq.kv.reach[0] // self._size if self._policy.at_forks and seq.kv.reach else None

    def _is_kept(self, row: int, num_tokens: int) -> bool:
        """True if a snapshot of a row is cached although another may follow."""
        seq, blocks = self._rows.seqs[row], num_tokens // self._size
        assert seq is not None and self._policy is not None
        return not self._policy.last_only or blocks < (seq.num_prompt - 1) // self._size or blocks == self._fork(row)

    def share(self, row: int, num_tokens: int) -> int | None:
        """Adds an owner to a row's state after some tokens, to which the row then writes no more: all that it has
        computed, or all but the last of a prompt for which others wait.

        Returns:
          The slot, FAR for no tokens; None if that state is gone, or no other slot is left for the row.
        """
        r = self._rows
        if not num_tokens:
            return FAR
        slot = self._for_forks.get(row)
        if num_tokens == r.num_computed[row]:
            slot = int(r.state_from[row])
            if r.state_to[row] == slot:
                if self._num_spare <= 0:
                    return None
                r.state_to[row] = self._slots.take()
        if slot is not None:
            self._slots.share(slot)
        return slot

    def _hold(self, row: int) -> None:
        """Keeps the state before the last token of a prompt for the sequences that will fork there."""
        r, seq = self._rows, self._rows.seqs[row]
        assert seq is not None
        if seq.forks and 0 < (count := int(r.num_computed[row])) == seq.num_prompt - 1:
            if (slot := self.share(row, count)) is not None:
                self._for_forks[row] = slot

    def end_forks(self, row: int) -> None:
        """Releases the state that was kept for forks."""
        if (slot := self._for_forks.pop(row, None)) is not None:
            self._slots.give_back(slot)

    def _expect(self, row: int) -> None:
        """Lets other prompts wait for the next snapshot of a row, if its tokens are known."""
        r, seq = self._rows, self._rows.seqs[row]
        assert seq is not None
        at = int(r.cache_at[row])
        if at < seq.num_prompt and self._is_kept(row, at):
            self._prefixes.expect_state(seq.kv, r.token_ids[row], at // self._size)
        else:
            self._prefixes.expect_no_more(seq.kv)

    def split(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Takes slots for the snapshots within chunks, (row, tokens)."""
        r = self._rows
        for row, count in chunks:
            end = r.num_computed[row] + count
            # A snapshot at its end, which reaches further, may need the last spare slot.
            if r.num_computed[row] < r.cache_at[row] < end and self._num_spare > (end == r.snapshot_at[row]):
                r.state_via[row] = self._slots.take()

    def advance(self, rows: np.ndarray) -> None:
        """Records that a step has written the states of some rows, and takes the snapshots that are due."""
        r = self._rows
        moved = rows[r.state_from[rows] != r.state_to[rows]]
        for slot in r.state_from[moved].tolist():
            if slot != FAR:
                self._slots.give_back(slot)
        r.state_from[rows] = r.state_to[rows]
        computed = r.num_computed[rows]
        for row in rows[(computed == r.snapshot_at[rows]) | (computed >= r.cache_at[rows])].tolist():
            count, at, taken = int(r.num_computed[row]), int(r.cache_at[row]), []
            if (via := int(r.state_via[row])) != FAR:
                taken.append((at, via))
                r.state_via[row] = FAR
            if count > at:
                at = self._next(row, at)
            if count == at and (slot := self.share(row, count)) is not None:
                taken.append((count, slot))
            self._hold(row)
            self._plan(row)
            if taken:
                self._pending.setdefault(row, []).extend(taken)
            else:
                self._expect(row)

    def index(self) -> None:
        """Caches the snapshots whose tokens are known."""
        for row in list(self._pending):
            self._index(row)

    def _index(self, row: int, ends: bool = False) -> None:
        """Caches the snapshots of a row whose tokens are known; the last of those that follow each other if it ends."""
        r, waits, last = self._rows, [], None
        for num_tokens, slot in self._pending.pop(row):
            if num_tokens >= r.num_known[row]:
                waits.append((num_tokens, slot))
            elif self._is_kept(row, num_tokens):
                self._cache(row, num_tokens, slot)
            else:
                if last is not None:
                    self._slots.give_back(last[1])
                last = num_tokens, slot
        if last is not None and ends:
            self._cache(row, *last)
        elif last is not None:
            waits.insert(0, last)
        if waits:
            self._pending[row] = waits
        else:
            self._expect(row)

    def _cache(self, row: int, num_tokens: int, slot: int) -> None:
        r, seq = self._rows, self._rows.seqs[row]
        assert seq is not None
        if seq.kv.cacheable:
            self._slots.cache(seq.kv, r.token_ids[row], num_tokens, slot)
        self._slots.give_back(slot)

    def leave(self, rows: np.ndarray) -> None:
        """Takes the slots of rows that end. Snapshots of tokens that are known stay."""
        r = self._rows
        for row in rows.tolist():
            seq = r.seqs[row]
            assert seq is not None
            if row in self._pending and seq.finish_reason is not FinishReason.ERROR:
                self._index(row, ends=True)
            held = {int(of[row]) for of in (r.state_from, r.state_to, r.state_via)} - {FAR}
            for slot in [*held, *(slot for _, slot in self._pending.pop(row, []))]:
                self._slots.give_back(slot)
            self.end_forks(row)
            r.state_from[row] = r.state_to[row] = r.state_via[row] = FAR

    def check(self, waiting: Sequence[KVState]) -> None:
        """Checks the slots that rows and waiting sequences own against the pool's counts.

        Raises:
          AssertionError: they disagree, see `BlockManager.check` and `Tier.check`.
        """
        r = self._rows
        of_rows = np.stack([r.state_from, r.state_to, r.state_via], axis=1)[r.alive].tolist()
        held = [slot for slots in of_rows for slot in {*slots} - {FAR}]
        held += [slot for found in self._pending.values() for _, slot in found]
        held += [*self._for_forks.values(), *(kv.shared.state for kv in waiting if kv.shared if kv.shared.state != FAR)]
        swapped = [np.array([kv.swapped.state], np.int32) for kv in waiting if kv.swapped]
        check_states(self._memory, [np.array(held, np.int32)], swapped)
