"""Measures how long it takes to move blocks between an engine's tiers: on its executor, and to and from files."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.engine.engine import Engine
from ksana_jax.kv.disk.block_file import BlockFacts, BlockFormat, read_block, write_block
from ksana_jax.kv.layout import Leaf
from ksana_jax.kv.moves import Moves

# Times that each move is repeated, after one that is not counted.
REPEATS = 5
# Blocks moved at once, and file sizes in multiples of a block.
BLOCKS, FILES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)
_NONE = np.zeros((0, 2), np.int32)


def measure_moves(engine: Engine) -> list[dict[str, Any]]:
    """Returns the times of moves, as `move_cost.fit_moves` takes them, of the tiers that an engine has.

    The engine must be idle, and serve nothing afterwards: its pool and its host's blocks are overwritten. Files are
    written to a folder in disk_cache_dir and read again, so that they come from the system's file cache.
    """
    found = [] if engine.memory.host is None else _of_host(engine)
    if (folder := engine.config.disk_cache_dir) is not None:
        os.makedirs(folder, exist_ok=True)
        found += _of_disk(Path(folder).expanduser(), engine.scheduler.layout.block_bytes)
    return found


def _of_host(engine: Engine) -> list[dict[str, Any]]:
    executor: Any = engine.executor
    room, slots = engine.scheduler.blocks.num_blocks // 2, len(executor.host_blocks)
    found = []
    for count in (count for count in BLOCKS if count <= min(room, slots)):
        same, beyond = np.arange(count, dtype=np.int32), np.arange(room, room + count, dtype=np.int32)
        pairs, apart = np.stack([same, same], axis=1), np.stack([same, beyond], axis=1)
        moves = {
            "saved": Moves(pairs, _NONE, _NONE),
            "copied": Moves(_NONE, apart, _NONE),
            "loaded": Moves(_NONE, _NONE, pairs),
        }
        for way, one in moves.items():

            def move(one: Moves = one) -> None:
                executor.move(one)
                for leaf in executor.cache.leaves.values():
                    leaf.block_until_ready()

            found += _timed(way, count * engine.scheduler.layout.block_bytes, move)
    return found


def _of_disk(folder: Path, block_bytes: int) -> list[dict[str, Any]]:
    found, facts = [], BlockFacts(bytes(32), bytes(32), bytes(64), 0)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path, temporary = Path(name, "block"), Path(name, "temporary")
        for times in FILES:
            size = times * block_bytes
            format = BlockFormat("measured", (Leaf("kv", (size,), "uint8"),))
            data, out = np.random.default_rng(0).integers(0, 256, size, np.uint8), np.empty(size, np.uint8)
            found += _timed("written", size, lambda: write_block(path, temporary, format, facts, data))  # noqa: B023  called at once
            found += _timed("read", size, lambda: read_block(path, format, facts, out))  # noqa: B023  called at once
    return found


def _timed(way: str, num_bytes: int, move: Callable[[], Any]) -> list[dict[str, Any]]:
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        move()
        seconds.append(time.perf_counter() - began)
    return [{"way": way, "num_bytes": num_bytes, "seconds": s} for s in seconds[1:]]
