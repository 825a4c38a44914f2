"""Traces the pools of an engine: the owners of all blocks after each step. Changes nothing; no jax."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ksana_jax.engine.engine import Engine
from ksana_jax.engine.inspect.snapshot import TIERS, counts, moved_bytes, owners_of
from ksana_jax.kv.owner import Owner
from ksana_jax.kv.tier import Tier

FREE, CACHED, BUSY = -1, -2, -3  # BUSY: of a move or read that belongs to no request


class PoolState(NamedTuple):
    """The blocks of one tier after a step.

    owners: [M] int32, number of the request that owns each block, the first of several; or FREE, CACHED or BUSY.
    shared: [M] bool, whether the block has more than one owner.
    held: number of owned blocks. fragmentation: fraction of their slots without a token.
    """

    owners: np.ndarray
    shared: np.ndarray
    held: int
    fragmentation: float


class Column(NamedTuple):
    """One observation after a step: the step's number from 1, seconds since the first one ended, pools by tier, and
    bytes moved since the trace began, by direction."""

    step: int
    time_s: float
    pools: dict[str, PoolState]
    moved_bytes: dict[str, int]


class PoolTrace:
    """Records the owners of all blocks after each step of an engine, from now on.

    The trace restarts whenever the engine's records are cleared (`LLM.clear_records`), so both cover the same steps.

    Args:
      max_columns: maximum number of columns, at least 2; when exceeded, every other one is dropped. The last step is
        always kept.

    Attributes:
      requests: {id: number}, in order of their first block.
      num_steps: number of steps observed.
    """

    def __init__(self, engine: Engine, max_columns: int = 500):
        self.max_columns, self._memory = max_columns, engine.memory
        self._last_counts = self._counts()
        self._begin(0.0)
        engine.observers.append(self.observe)

    def _begin(self, time_s: float) -> None:
        self.requests: dict[str, int] = {}
        self.num_steps = 0
        self._kept: list[Column] = []
        self._last: Column | None = None
        self._stride = 1
        self._began_s, self._before = time_s, self._last_counts

    @property
    def columns(self) -> list[Column]:
        """Returns the recorded columns, evenly spaced, and the last step's."""
        missing = self._last is not None and (not self._kept or self._kept[-1] is not self._last)
        return [*self._kept, *([self._last] if missing and self._last else [])]

    def observe(self, engine: Engine) -> None:
        """Records the step that an engine has just completed."""
        now = engine.records[-1].ended_s
        if not self.num_steps or len(engine.records) <= self.num_steps:
            self._begin(now)
        self._last_counts = self._counts()
        self.num_steps += 1
        owners = list(owners_of(engine))
        pools = {
            TIERS[tier.level]: self._pool(tier, [owner for owner in owners if owner.tier == tier.level])
            for tier in (self._memory.device, self._memory.host)
            if tier is not None
        }
        moved = moved_bytes(self.counters, self._memory.layout.block_bytes)
        self._last = Column(self.num_steps, now - self._began_s, pools, moved)
        if (self.num_steps - 1) % self._stride == 0:
            self._kept.append(self._last)
            if len(self._kept) > self.max_columns:
                self._kept, self._stride = self._kept[::2], 2 * self._stride

    def _pool(self, tier: Tier, owned: list[Owner]) -> PoolState:
        pool, size = tier.pool, self._memory.block_size
        owners = np.where(pool.kept, np.int32(CACHED), np.int32(FREE))
        tokens = np.zeros(pool.num_blocks, np.int32)
        tokens[pool.kept] = size
        for owner in reversed(owned):  # the first of several writes last
            number = self.requests.setdefault(owner.request_id, len(self.requests)) if owner.request_id else BUSY
            owners[owner.ids] = number
            if owner.starts is not None:
                here = np.clip(owner.num_tokens - owner.starts, 0, size)
                tokens[owner.ids] = np.maximum(tokens[owner.ids], here)
        held = pool.ref_count > 0
        filled = int(tokens[held].sum())
        return PoolState(
            owners, pool.ref_count > 1, pool.num_used, 1 - filled / (pool.num_used * size) if pool.num_used else 0.0
        )

    @property
    def counters(self) -> dict[str, int]:
        """Returns the counters of `snapshot.counts` since the trace began."""
        return {name: value - self._before[0][name] for name, value in self._last_counts[0].items()}

    @property
    def num_blocks_by_origin(self) -> dict[str, int]:
        """Returns `KVMemory.num_blocks_by_origin` since the trace began."""
        differences = {k: v - self._before[1].get(k, 0) for k, v in self._last_counts[1].items()}
        return {k: v for k, v in differences.items() if v}

    def _counts(self) -> tuple[dict[str, int], dict[str, int]]:
        return counts(self._memory), dict(self._memory.num_blocks_by_origin)
