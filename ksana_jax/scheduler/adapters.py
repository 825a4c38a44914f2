"""Adapters of requests and their slots on the device. Knows rows and names, not what an adapter holds. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ksana_jax.core.lora import salted
from ksana_jax.scheduler.sequence import Rows


class AdapterSlots:
    """The slots that hold adapters on the device. An adapter stays in its slot while a row runs with it; others are
    replaced, first the one whose last step is the longest ago.

    Args:
      write: (slot, adapter) writes an adapter to a slot.

    Attributes:
      num_writes: adapters written so far.
    """

    def __init__(self, num_slots: int, write: Callable[[int, Any], None]):
        self._write, self._num_slots = write, num_slots
        self.num_writes = 0
        self.clear()

    def clear(self) -> None:
        """Empties all slots. Only while nothing runs or waits."""
        self._free = list(range(self._num_slots - 1, -1, -1))
        self._slots: dict[str, int] = {}  # by digest; the last one was used last

    def place(self, use: AdapterUse, rows: Rows) -> bool:
        """Gives an adapter a slot, unless it has one; returns False if running rows need all slots."""
        if use.digest in self._slots:
            return True
        if not self._free:
            running = {seq.adapter.digest for seq in rows.seqs if seq is not None and seq.adapter is not None}
            if (idle := next((digest for digest in self._slots if digest not in running), None)) is None:
                return False
            self._free.append(self._slots.pop(idle))
        self._write(self._free[-1], use.adapter)
        self._slots[use.digest] = self._free.pop()
        self.num_writes += 1
        return True

    def used(self, digest: str) -> int:
        """Returns the slot of a running row's adapter, which is used now."""
        slot = self._slots[digest] = self._slots.pop(digest)
        return slot


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterUse:
    """The adapter of a request.

    digest: of its contents. adapter: what `AdapterSlots` writes.
    """

    digest: str
    adapter: Any
    slots: AdapterSlots

    def ready(self, rows: Rows) -> bool:
        """Places it on the device unless it is there; returns False if the running rows need all slots."""
        return self.slots.place(self, rows)

    def salted(self, cache_salt: str) -> str:
        """Returns the salt of the request's prefixes, given its own."""
        return salted(self.digest, cache_salt)
