"""Copies whole blocks between the device's pool, the host's, and within the pool. Knows arrays and indices only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.ops.pool import KVCache
from ksana_jax.runner.compiling import compiled
from ksana_jax.step.contract import Moves

# Blocks moved by one call; a move of n takes the smallest that holds it, larger ones go in several calls.
SIZES = (1, 8, 64)
# Moves that are waited for, to learn what they cost.
NUM_TIMED = 4


def staging_memory(device: Any) -> str:
    """Returns the memory that copies between a device and NumPy arrays should cross: "pinned_host" or "none".

    A CPU device computes on the host's memory: a detour would be one more copy.
    """
    kinds = {memory.kind for memory in device.addressable_memories()}
    return "pinned_host" if device.platform != "cpu" and "pinned_host" in kinds else "none"


class BlockMover:
    """Makes `step.Moves` on a pool.

    Args:
      num_slots: blocks of the host, preallocated.
      staging: memory that blocks cross on their way between device and host: "pinned_host", from where a device copies
        without the processor, "none", or "auto" (`staging_memory`).

    Attributes:
      host_blocks: [num_slots, L, 2, K, B, H] in the pool's type.

    Raises:
      ValueError: the device has no such memory.
    """

    def __init__(self, cache: KVCache, num_slots: int, staging: str = "auto"):
        blocks = cache.blocks
        self.host_blocks = np.zeros((num_slots, *blocks.shape[1:]), blocks.dtype)
        self._compiled: dict[Any, Callable] = {}
        self._num_timed = 0
        self._piece = jax.ShapeDtypeStruct(blocks.shape, blocks.dtype)
        device = jax.devices()[0]
        self._on_device = jax.sharding.SingleDeviceSharding(device)
        self._staged = None
        if (kind := staging_memory(device) if staging == "auto" else staging) != "none":
            self._staged = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)

    def reset(self) -> None:
        """Replaces the host's blocks; whoever still writes to the old ones does no harm."""
        self.host_blocks = np.zeros_like(self.host_blocks)

    @property
    def num_compilations(self) -> int:
        return len(self._compiled)

    def warm_up(self) -> None:
        """Compiles what any moves can need."""
        for size in SIZES:
            for function in (self._copy, self._gather, self._scatter):
                function(size)

    def start(self, cache: KVCache, moves: Moves) -> tuple[KVCache, list[tuple[np.ndarray, jax.Array]], float]:
        """Makes moves, as far as the device is concerned.

        Returns:
          The pool, saves that `finish` must take in, and the seconds it took where that was waited for, or 0.
        """
        timed = self._num_timed < NUM_TIMED and all(key in self._compiled for key in self._needed(moves))
        if timed:
            self._num_timed += 1
            jax.block_until_ready(cache.blocks)
        began = time.perf_counter()
        saved = []
        for ids, slots in _pieces(moves.saves):
            out = self._gather(len(ids))(cache.blocks, ids)
            saved.append((slots, out if self._staged is None else jax.device_put(out, self._staged)))
        blocks = cache.blocks
        copies = _pieces(moves.copies)
        # Of several pieces all are read before one is written.
        read = [(self._gather(len(old))(blocks, old), new) for old, new in copies[1:]]
        for old, new in copies[:1]:
            blocks = self._copy(len(old))(blocks, old, _padded(new, len(old), len(blocks)))
        for data, new in read:
            blocks = self._scatter(len(data))(blocks, _padded(new, len(data), len(blocks)), data)
        if len(moves.loads) and set(moves.loads[:, 0].tolist()) & set(moves.saves[:, 1].tolist()):
            self.finish(saved)
            saved = []
        for slots, ids in _pieces(moves.loads):
            data = self.host_blocks[slots]
            if self._staged is not None:
                data = jax.device_put(data, self._staged)
            # Without a target device_put leaves an array where it is, and the compiled scatter refuses pinned memory.
            data = jax.device_put(data, self._on_device)
            blocks = self._scatter(len(data))(blocks, _padded(ids, len(data), len(blocks)), data)
        cache = KVCache(blocks)
        if timed:
            jax.block_until_ready([cache.blocks, saved])
            self.finish(saved)
            return cache, [], time.perf_counter() - began
        return cache, saved, 0.0

    def finish(self, saved: list[tuple[np.ndarray, jax.Array]]) -> None:
        """Takes saves in, which the device has been copying meanwhile."""
        for slots, data in saved:
            self.host_blocks[slots] = np.asarray(data)[: len(slots)]

    def _needed(self, moves: Moves) -> list[tuple[str, int]]:
        kinds = (("gather", moves.saves), ("copy", moves.copies), ("scatter", moves.loads))
        return [(kind, len(ids)) for kind, pairs in kinds for ids, _ in _pieces(pairs)]

    def _gather(self, size: int) -> Callable:
        return self._function("gather", size, lambda blocks, ids: blocks[ids], self._ids(size), donates=False)

    def _scatter(self, size: int) -> Callable:
        data = jax.ShapeDtypeStruct((size, *self._piece.shape[1:]), self._piece.dtype)
        return self._function(
            "scatter", size, lambda blocks, ids, data: blocks.at[ids].set(data, mode="drop"), self._ids(size), data
        )

    def _copy(self, size: int) -> Callable:
        return self._function(
            "copy", size, lambda blocks, old, new: blocks.at[new].set(blocks[old], mode="drop"),
            self._ids(size), self._ids(size),
        )  # fmt: skip

    @staticmethod
    def _ids(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32)

    def _function(self, name: str, size: int, run: Callable, *arguments: Any, donates: bool = True) -> Callable:
        key = (name, size)
        if key not in self._compiled:
            jitted = jax.jit(run, donate_argnums=0 if donates else ())
            self._compiled[key] = compiled(key, lambda: jitted.lower(self._piece, *arguments))
        return self._compiled[key]


def _pieces(pairs: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Froms and tos, in pieces of SIZES; froms are padded with their last one, tos are as many as there are."""
    found = []
    for start in range(0, len(pairs), SIZES[-1]):
        some = pairs[start : start + SIZES[-1]]
        size = next(s for s in SIZES if s >= len(some))
        found.append((np.pad(some[:, 0], (0, size - len(some)), mode="edge"), some[:, 1]))
    return found


def _padded(ids: np.ndarray, size: int, beyond: int) -> np.ndarray:
    """Ids to write to, padded with one that does not exist."""
    return np.pad(ids, (0, size - len(ids)), constant_values=beyond)
