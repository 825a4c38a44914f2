"""Whether a waiting sequence can start in what is left of a step. Counts tokens, tiles and blocks; places nobody."""

from __future__ import annotations

import dataclasses

from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.prefix_cache import Hit
from ksana_jax.kv.state import HeldBlocks
from ksana_jax.scheduler.queue import WaitingQueue
from ksana_jax.sequence import Sequence
from ksana_jax.step.contract import Part


@dataclasses.dataclass
class StepBudget:
    """What is left of a step: tokens, and query tiles for rows that compute more than one.

    tiles: how many there would be of each width, the widest first. All tiles of a step have one width: the widest that
      holds its chunks.
    """

    tokens: int
    tiles: list[Part]

    def most(self, left: int) -> int:
        """How many of a row's `left` tokens fit."""
        if left == 1:
            return min(self.tokens, 1)
        wide, *narrow = [part.count * part.width for part in self.tiles]
        if wide > 0:
            return min(left, self.tokens, wide)
        # A chunk that is cut anyway waits, rather than having the whole step read its keys for fewer queries at once.
        return left if any(left <= min(self.tokens, tokens) for tokens in narrow) else 0

    def take(self, count: int) -> None:
        """Uses up what a row of `count` tokens needs."""
        self.tokens -= count
        if count > 1:
            self.tiles = [Part(free - -(-count // width), width) for free, width in self.tiles]


@dataclasses.dataclass(frozen=True)
class Admission:
    """Asks `memory` for the room that a sequence needs, and `queue` to make some when nothing else can.

    Args:
      layout: which positions stay visible to later tokens, in each group of layers.
      longest_chunk: most tokens of a step.
    """

    memory: KVMemory
    queue: WaitingQueue
    layout: KVLayout
    longest_chunk: int

    def fits(self, seq: Sequence, hit: Hit | None, budget: StepBudget, alone: bool, reserve: int) -> bool:
        """Whether a waiting sequence can start: all it brings along, and its first chunk.

        Args:
          reserve: blocks that stay free, so that those who run can go on.
          hit: what it found in the cache, pinned.
          alone: nothing runs; then part of a chunk is better than waiting for ever, and sequences that wait give up the
            blocks that they share.
        """
        device, size, total = self.memory.device, self.memory.block_size, len(seq.token_ids)
        kv, held = seq.kv, seq.kv.held
        done = hit.num_tokens if hit else held.num_computed if held else 0
        left = total - done
        if not budget.most(left):
            return False
        loads = hit.num_loads if hit else len(kv.swapped.ids) if kv.swapped else 0
        # One that was preempted starts when all its tokens fit, or it would soon be preempted again.
        count = left if seq.num_preemptions and not alone else budget.most(left)
        allocated = -(-done // size) * size
        most, num_groups = self.layout.blocks_of(total, self.longest_chunk), len(self.layout.groups)

        def first_blocks() -> int:
            """Blocks without which not even one token can be computed."""
            if done >= allocated:
                return loads + num_groups
            return loads + (0 if kv.shared is None else self._num_shared(kv.shared))

        more = (-(-max(done + count - allocated, 0) // size) - (done >= allocated)) * num_groups
        # A fork goes on with what its parent holds: it waits for no reserve.
        if min(first_blocks() + more, most) + (0 if kv.shared else reserve) <= device.num_available:
            return True
        if not alone:
            return False
        while first_blocks() > device.num_available:
            if not self.queue.reclaim_shared(seq):
                return False
        return True

    def _num_shared(self, held: HeldBlocks) -> int:
        """How many of a sequence's last blocks, one in each group, must be copied before it writes to them."""
        last = [held.ids[held.groups == group][-1] for group in range(len(self.layout.groups))]
        return sum(map(self.memory.device.is_shared, last))
