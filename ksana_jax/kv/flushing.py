"""Writes all cached content to disk, as an engine does that ends in good order. No jax."""

from __future__ import annotations

from collections.abc import Iterator

from ksana_jax.kv.device_tier import DeviceTier
from ksana_jax.kv.disk.tier import DiskTier
from ksana_jax.kv.host_tier import HostTier
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.tier import HOST

# Blocks that `flush` moves and writes before it waits for the disk.
FLUSHED_AT_ONCE = 64


def flush(memory: KVMemory) -> Iterator[None]:
    """Writes cached content to disk in batches of blocks, deepest blocks first.

    Call it while nothing runs and no move is pending; after each yield, the caller makes the moves that it added.
    """
    for tier in (memory, memory.states):
        if tier is not None and tier.host is not None and tier.disk is not None and tier.host.write != "drop":
            device = memory.device if isinstance(tier, KVMemory) else tier
            yield from _flush(device, tier.host, tier.disk)


def _flush(device: DeviceTier, host: HostTier, disk: DiskTier) -> Iterator[None]:
    nodes = {*host.node_of.values(), *device.node_of.values()}
    nodes = [node for node in nodes if node.key not in disk]
    nodes.sort(key=lambda node: (-node.depth, node.key))
    at_once = min(FLUSHED_AT_ONCE, host.pool.num_available)
    for start in range(0, len(nodes), at_once):
        for node in nodes[start : start + at_once]:
            if node.at[HOST] >= 0:
                host.write_to_disk(node)
            elif node.is_stored:
                device.save(node)
                host.write_to_disk_later(node)
        yield
        disk.flush()
