"""Sequences as owners of blocks, for inspection."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ksana_jax.kv.owner import Owner
from ksana_jax.kv.tier import DEVICE, HOST
from ksana_jax.scheduler.scheduler import Scheduler


def owners(scheduler: Scheduler) -> Iterator[Owner]:
    """Yields sequences as owners of blocks: running ones in order, then waiting ones that hold some."""
    r, reads = scheduler.rows, scheduler.memory.disk_reads
    for row in scheduler.order.tolist():
        seq = r.seqs[row]
        assert seq is not None
        ids, starts, origins = (r.of_blocks(x, row) for x in (r.block_tables, r.block_starts, r.block_origins))
        cached = np.repeat(r.num_computed[row] - r.num_evicted[:, row], r.num_blocks[:, row])
        yield Owner(seq.request_id, seq.index, "runs", DEVICE, ids, starts, cached, origins)
    for _, _, seq in scheduler.waiting:
        for tier, held in ((DEVICE, seq.kv.shared), (HOST, seq.kv.swapped)):
            if held is not None:
                yield Owner(
                    seq.request_id, seq.index, "waits", tier, held.ids, held.starts, held.num_cached, held.origins
                )
        if reads is not None and len(slots := reads.reserved(seq.kv)):
            yield Owner(seq.request_id, seq.index, "reads", HOST, slots)
