"""python -m experiments.selection.times [MODEL]: times a decode step that reads all blocks, and one with each method.

The engines are in one process and take turns. Keys are random and blocks scattered; lengths are in tokens.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax import LLM
from ksana_jax.kv.reading import read_bytes
from ksana_jax.kv.selection import SELECTION_METHODS
from ksana_jax.ops.pool import KVCache
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepArrays, StepInput, StepShape, TileGroup

LENGTHS, BLOCK, BUDGET, STEPS = (2048, 4096, 8000), 16, 1024, 40


def make(model: str, selection: dict[str, object] | None) -> Runner:
    """A runner whose pool holds random keys and values, and their summaries."""
    longest = max(LENGTHS)
    llm = LLM(
        model,
        block_size=BLOCK,
        num_blocks=longest // BLOCK + 8,
        max_model_len=longest + 192,
        max_num_seqs=1,
        kv_selection=selection,
    )
    runner = llm.runner
    leaves = dict(runner.cache.leaves)
    leaves["kv"] = (0.3 * jax.random.normal(jax.random.key(0), leaves["kv"].shape)).astype(leaves["kv"].dtype)
    if selection is not None:
        keys = leaves["kv"][:, :, 0]
        leaves["summary"] = jnp.stack([keys.min(axis=3), keys.max(axis=3)], axis=3)[:, :, None]
    runner.cache = KVCache(leaves, runner.cache.codec)
    return runner


def decode(length: int, selects: bool) -> StepInput:
    """A step with the newest token of one row."""
    width = length // BLOCK
    tables = np.random.default_rng(0).permutation(width).astype(np.int32)[None, None]
    starts = (BLOCK * np.arange(width, dtype=np.int32))[None, None]
    slots = tables[:, :, -1] * BLOCK + BLOCK - 1
    newest = np.array([length - 1], np.int32)
    arrays = StepArrays(np.array([77], np.int32), newest, newest[None], slots, tables, starts, np.zeros(1, np.int32))
    if selects:
        arrays = arrays._replace(query_numbers=np.ones((1, 1), np.float32))
    return StepInput(StepShape((TileGroup(1, 1),), width, 1), arrays, 1, length)


def main(model: str = "smollm2") -> None:
    runners = {"all blocks": make(model, None)}
    runners |= {
        name: make(model, {"method": name, "budget": BUDGET})
        for name in SELECTION_METHODS
        if name != "lightning_indexer"
    }
    print("tokens  KiB of KV read, ms a step: median (fastest)")
    for length in LENGTHS:
        times: dict[str, list[float]] = {name: [] for name in runners}
        for turn in range(STEPS + 2):
            for name, runner in runners.items():
                step, began = decode(length, runner.layout.selection is not None), time.perf_counter()
                runner.submit(step).result()
                jax.block_until_ready(runner.cache.leaves["kv"])
                if turn >= 2:  # the first ones compile
                    times[name].append(1e3 * (time.perf_counter() - began))
        read = {name: read_bytes(runner.layout, length, length // BLOCK) // 1024 for name, runner in runners.items()}
        found = (f"{name} {read[name]:,}, {statistics.median(ms):.1f} ({min(ms):.1f})" for name, ms in times.items())
        print(f"{length:6}  {'; '.join(found)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
