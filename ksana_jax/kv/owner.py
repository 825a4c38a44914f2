"""Who owns which block, for inspection and checks. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.state import Origin
from ksana_jax.kv.tier import DEVICE, HOST


class Owner(NamedTuple):
    """One owner of some blocks of a tier.

    request_id, index: as in `Sequence`; request_id is empty if the owner is a move or a read instead of a request.
    doing: "runs", "waits" (with shared or swapped blocks), "reads" from disk, "moves".
    tier: DEVICE or HOST.
    ids, starts: [n] blocks and the cache positions where they begin; starts is None if only their nodes know.
    num_tokens: cached tokens of the sequence, [n] in each block's group of layers. origins: [n]. Both may be one
      value for all.
    """

    request_id: str
    index: int
    doing: str
    tier: int
    ids: np.ndarray
    starts: np.ndarray | None = None
    num_tokens: np.ndarray | int = 0
    origins: np.ndarray | Origin | None = None

    @property
    def label(self) -> str:
        name = f"{self.request_id}/{self.index}" if self.request_id else "(no request)"
        return name if self.doing == "runs" else f"{name} {self.doing}"


def memory_owners(memory: KVMemory) -> Iterator[Owner]:
    """Yields the owners of host slots that are not sequences: moves and late reads."""
    if memory.host is not None:
        yield Owner("", 0, "moves", HOST, np.array(memory.host.in_moves, np.int32))
        if memory.disk_reads is not None:
            yield Owner("", 0, "reads", HOST, memory.disk_reads.late(memory.host))


def moving_blocks(memory: KVMemory, level: int) -> set[int]:
    """Blocks of a tier whose content has not arrived yet."""
    if level == DEVICE:
        return {*memory.moves.copies, *memory.moves.loads}
    reading = () if memory.disk_reads is None else memory.disk_reads.reading()
    return {*reading, *(slot for saves in memory.moves.all_saves for slot in saves)}


def check_memory(memory: KVMemory, owned: Iterable[np.ndarray], swapped: Iterable[np.ndarray] = ()) -> None:
    """Checks that reference counts agree with the blocks that sequences hold.

    Args:
      owned: one array of device blocks per owner. swapped: one array of host slots per owner.

    Raises:
      AssertionError: see `BlockManager.check`, `Tier.check` and `PrefixIndex.check`.
    """
    memory.device.pool.check(owned)
    memory.device.check()
    memory.index.check()
    if memory.host is not None:
        _check_host(memory, memory.host, swapped)


def check_states(memory: KVMemory, owned: Iterable[np.ndarray], swapped: Iterable[np.ndarray] = ()) -> None:
    """Checks the slots for states likewise; see `check_memory`."""
    assert memory.states is not None
    memory.states.pool.check(owned)
    memory.states.check()
    if memory.states.host is not None:
        _check_host(memory, memory.states.host, swapped)


def _check_host(memory: KVMemory, host: HostTier, swapped: Iterable[np.ndarray]) -> None:
    reads, own = memory.disk_reads, [np.array(host.in_moves, np.int32)]
    own += [] if reads is None else [reads.late(host), *reads.all_reserved(host)]
    host.pool.check([*own, *swapped])
    host.check()
