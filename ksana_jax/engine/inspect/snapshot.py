"""Snapshots of block ownership: every block of every tier, as plain values. Changes nothing; no jax."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.engine.engine import Engine
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import Owner, memory_owners, moving_blocks
from ksana_jax.kv.state import Origin
from ksana_jax.kv.tier import Tier
from ksana_jax.scheduler.owners import owners

TIERS = ("device", "host", "disk")
STATES = ("free", "held", "cached", "moving")
WAYS = {
    "device to host": "saved",
    "host to device": "loaded",
    "within device": "copied",
    "host to disk": "disk_written",
    "disk to host": "disk_read",
}


class Ownership(NamedTuple):
    """One owner of one block. origin: how it obtained the block, see `Origin`; None for a read or a move."""

    request_id: str
    index: int
    doing: str
    origin: str | None


class BlockRecord(NamedTuple):
    """Describes one block.

    tier: one of TIERS. block: its id there; on disk, its index in the list.
    state: "free"; "moving", its content has not arrived yet; "held", it has owners; "cached", kept without an owner.
    ref_count: number of owners. owners: the owners.
    hash: its key in the prefix index, in hex; None if it is not indexed.
    start: cache position of its first slot, the sequence position unless its owner evicted tokens; None if it is free.
    num_tokens: number of filled slots.
    last_use: counter value of the prefix index, which rises with each hit and insertion; None if it is not indexed.
    """

    tier: str
    block: int
    state: str
    ref_count: int = 0
    owners: tuple[Ownership, ...] = ()
    hash: str | None = None
    start: int | None = None
    num_tokens: int = 0
    last_use: int | None = None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All blocks at one moment, as returned by `take_snapshot`.

    Args:
      block_size: B, slots per block. block_bytes: bytes per block.
      blocks: blocks of the device, the host and the disk.
      counters: see `counts`.
      slots: for each memory, how many of its slots for states of recurrent layers are free, held and cached.
    """

    block_size: int
    block_bytes: int
    blocks: list[BlockRecord]
    counters: dict[str, int]
    slots: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    def of(self, tier: str) -> list[BlockRecord]:
        """Returns the blocks of one tier."""
        return [b for b in self.blocks if b.tier == tier]

    def of_request(self, request_id: str) -> list[BlockRecord]:
        """Returns the blocks that a request owns, by position; empty once it has ended."""
        mine = [b for b in self.blocks if any(o.request_id == request_id for o in b.owners)]
        return sorted(mine, key=lambda b: (TIERS.index(b.tier), b.start or 0, b.block))

    def summary(self) -> dict[str, Any]:
        """Returns statistics as plain values.

        device, host, disk: number of blocks in each state, and utilisation: the fraction of all blocks that is held.
        slots: see `Snapshot`; only in models with recurrent layers.
        fragmentation: fraction of the slots held on the device without a token.
        unshared_blocks: device blocks that the owners would hold without sharing; shared_saving: the fraction of them
        that sharing saves. blocks_by_origin: unshared_blocks by origin.
        hit_rate: fraction of the looked-up prompt tokens that was found, since the engine started. hit_blocks: by tier.
        moved_bytes: bytes moved since the engine started, by direction.
        """
        result: dict[str, Any] = {}
        for tier in TIERS:
            states = Counter(b.state for b in self.of(tier))
            if total := states.total():
                held = states["held"] + states["moving"]
                result[tier] = {"blocks": total, **{s: states[s] for s in STATES}, "utilisation": held / total}
        result |= {"slots": self.slots} if self.slots else {}
        held = [b for b in self.of("device") if b.ref_count]
        owned = [o for b in held for o in b.owners]
        result["fragmentation"] = 1 - _part(sum(b.num_tokens for b in held), len(held) * self.block_size, 1.0)
        result["unshared_blocks"] = len(owned)
        result["shared_saving"] = 1 - _part(len(held), len(owned), 1.0)
        result["blocks_by_origin"] = dict(Counter(o.origin for o in owned if o.origin is not None))
        c = self.counters
        result["hit_rate"] = _part(c["hit_tokens"], c["queried_tokens"])
        result["hit_blocks"] = {tier: c[f"hits_{tier}"] for tier in TIERS}
        result["moved_bytes"] = moved_bytes(c, self.block_bytes)
        return result

    def __str__(self) -> str:
        lines = [f"{'tier':6} {'block':>6} {'state':6} {'refs':>4} {'position':>13} {'last use':>8}  hash      owners"]
        for b in self.blocks:
            if b.state != "free":
                text = "" if b.start is None else f"{b.start:,}+{b.num_tokens}"
                used = "" if b.last_use is None else f"{b.last_use:,}"
                owners = ", ".join(_written(o) for o in b.owners)
                lines.append(
                    f"{b.tier:6} {b.block:6} {b.state:6} {b.ref_count:4} {text:>13} {used:>8}  "
                    f"{(b.hash or '')[:8]:8}  {owners}"
                )
        free = ", ".join(f"{n} of the {t}" for t in TIERS if (n := sum(b.state == "free" for b in self.of(t))))
        slots = [f"{tier} slots for states: {_listed(states)}" for tier, states in self.slots.items()]
        return "\n".join([*lines, f"free: {free or 'none'}", *slots])


def take_snapshot(engine: Engine) -> Snapshot:
    """Returns every block of every tier with its owners, content and last use. Call it between steps."""
    return snapshot_of(engine.memory, owners_of(engine))


def owners_of(engine: Engine) -> Iterator[Owner]:
    """Yields all owners of blocks, first sequences, then moves and reads; they account for all reference counts."""
    yield from owners(engine.scheduler)
    yield from memory_owners(engine.memory)


def snapshot_of(memory: KVMemory, owners: Iterable[Owner]) -> Snapshot:
    """Returns the snapshot of a memory whose blocks belong to `owners`."""
    blocks, owners = [], list(owners)
    for tier in (memory.device, memory.host):
        if tier is not None:
            blocks += _records(memory, tier, [owner for owner in owners if owner.tier == tier.level])
    if memory.disk is not None:
        for number, key in enumerate(memory.disk.keys()):
            facts, node = memory.disk.facts(key), memory.index.nodes.get(key)
            blocks.append(
                BlockRecord(
                    "disk",
                    number,
                    "cached",
                    hash=key.hex(),
                    start=facts.start if facts else None,
                    num_tokens=memory.block_size,
                    last_use=node.last_use if node else None,
                )
            )
    slots: dict[str, dict[str, int]] = {}
    for tier in (memory.states, memory.states and memory.states.host):
        if tier is not None:
            pool = tier.pool
            counted = {"free": pool.num_free, "held": pool.num_used, "cached": pool.num_idle}
            slots[TIERS[tier.level]] = counted
    return Snapshot(memory.block_size, memory.layout.block_bytes, blocks, counts(memory), slots)


def counts(memory: KVMemory) -> dict[str, int]:
    """Returns `kv.counters.Counters` as plain values, with the blocks written to and read from disk."""
    disk = memory.disk.counters if memory.disk is not None else None
    found = {"disk_written": disk.written if disk else 0, "disk_read": disk.read if disk else 0}
    return dataclasses.asdict(memory.counters) | found


def _records(memory: KVMemory, tier: Tier, owners: list[Owner]) -> list[BlockRecord]:
    pool, size = tier.pool, memory.block_size
    ownerships: dict[int, list[Ownership]] = {}
    starts, filled = np.full(pool.num_blocks, -1), np.zeros(pool.num_blocks, np.int64)
    for owner in owners:
        names: list[str | None] = [None] * len(owner.ids)
        if owner.origins is not None:
            names = [Origin(o).label for o in np.broadcast_to(owner.origins, len(owner.ids)).tolist()]
        for block, name in zip(owner.ids.tolist(), names, strict=True):
            ownerships.setdefault(block, []).append(Ownership(owner.request_id, owner.index, owner.doing, name))
        if owner.starts is not None:
            starts[owner.ids] = owner.starts
            # An owner of a shared block may have computed fewer of its tokens.
            filled[owner.ids] = np.maximum(filled[owner.ids], np.clip(owner.num_tokens - owner.starts, 0, size))
    moving = moving_blocks(memory, tier.level)
    records = []
    for block, count in enumerate(pool.ref_count.tolist()):
        node = tier.node_of.get(block)
        if node is None and not count:
            records.append(BlockRecord(TIERS[tier.level], block, "free"))
            continue
        state = "moving" if block in moving else "held" if count else "cached"
        start = int(starts[block]) if starts[block] >= 0 else node.depth * size if node else None
        tokens = size if node else int(filled[block])
        records.append(
            BlockRecord(
                TIERS[tier.level],
                block,
                state,
                count,
                tuple(ownerships.get(block, ())),
                node.key.hex() if node else None,
                start,
                tokens,
                node.last_use if node else None,
            )
        )
    return records


def moved_bytes(counters: dict[str, int], block_bytes: int) -> dict[str, int]:
    """Returns the bytes moved by direction, from `counts`."""
    return {way: counters[name] * block_bytes for way, name in WAYS.items()}


def _listed(counted: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counted.items())


def _part(some: float, whole: float, of_nothing: float = 0.0) -> float:
    return some / whole if whole else of_nothing


def _written(o: Ownership) -> str:
    name = f"{o.request_id}/{o.index}" if o.request_id else "no request"
    return name + (f" {o.doing}" if o.doing != "runs" else "") + (f" ({o.origin})" if o.origin else "")
