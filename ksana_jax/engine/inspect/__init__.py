"""Observes an engine: where each block is stored, which requests own it, and how that changes from step to step."""

from ksana_jax.engine.inspect.pool_trace import PoolTrace
from ksana_jax.engine.inspect.snapshot import BlockRecord, Snapshot, take_snapshot

__all__ = ["take_snapshot", "Snapshot", "BlockRecord", "PoolTrace"]
