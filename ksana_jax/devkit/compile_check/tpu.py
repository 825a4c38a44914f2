"""`ksana kernels check --target v5e`: compiles the engine's steps, and jax's own kernel, for an absent TPU.

The steps run the XLA path of attention. jax's kernel is compiled behind the contract, where it needs the visible blocks
gathered, and over a pool stored in the kernel's own order, without a copy: see `tpu_attention`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.devkit.compile_check import tpu_attention, tpu_topology
from ksana_jax.devkit.compile_check.models import LLAMA_8B, SHAPES, sizes_of
from ksana_jax.devkit.compile_check.steps import BLOCK_SIZE, collectives_of_step, lower_step
from ksana_jax.devkit.compile_check.targets import Target, find_target
from ksana_jax.scheduler.step.types import Part, StepShape
from pallas_kernels.aot.program import examine
from pallas_kernels.aot.report import Collective, describe_exchange
from pallas_kernels.contract import Call, Pool

LLAMA = ModelConfig(
    vocab_size=32_000,
    d_model=1024,
    num_layers=2,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    d_ff=2816,
    max_position=4096,
)
NUM_BLOCKS = 4096
TABLE_WIDTH = LLAMA.max_position // BLOCK_SIZE
# Devices that divide a Llama-8B, and blocks of a pool that fit beside its weights, 16 GB in all.
DIVIDED = ((2, 1024), (8, 8192))
DECODE, PREFILL = (StepShape((part,), TABLE_WIDTH, max_sampled=8) for part in (Part(8, 1), Part(4, 32)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile.

    lower: (target, num_blocks) -> the lowered program. collectives: see `pallas_kernels.aot.check.Case`.
    """

    name: str
    config: dict[str, Any]
    lower: Callable[[Target, int], Any]
    collectives: Counter[Collective] | None = None

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.config.items())])


def cases() -> list[Case]:
    found = []
    for phase, shape in (("decode", DECODE), ("prefill", PREFILL)):
        found += [
            Case("step of a small Llama", {"phase": phase}, functools.partial(_step, shape)),
            Case("jax's kernel, blocks gathered", {"phase": phase}, functools.partial(_gathered, shape)),
            Case("jax's kernel, pool in its order", {"phase": phase}, functools.partial(_in_order, shape)),
        ]
    for num_devices, num_blocks in DIVIDED:
        shape = SHAPES[1]
        step = functools.partial(_divided, shape, num_devices, num_blocks)
        expected = collectives_of_step(LLAMA_8B, shape, num_devices)
        found.append(Case("step of Llama-8B", {"devices": num_devices} | sizes_of(shape), step, expected))
    return found


def _step(shape: StepShape, target: Target, num_blocks: int):
    return lower_step(target, LLAMA, shape, num_blocks=num_blocks)


def _divided(shape: StepShape, num_devices: int, num_blocks: int, target: Target, _: int):
    return lower_step(target, LLAMA_8B, shape, num_devices=num_devices, num_blocks=num_blocks)


def _gathered(shape: StepShape, target: Target, num_blocks: int):
    """Lowers one layer's attention by jax's kernel behind the contract."""
    q, tables, starts, positions, _ = tiles(shape)
    pool = (num_blocks, LLAMA.num_layers, 2, LLAMA.num_kv_heads, BLOCK_SIZE, LLAMA.head_dim)

    def run(q, kv, tables, starts, positions):  # the pattern is a constant
        return tpu_attention.KERNEL(Call(q, Pool(kv), tables, starts, positions, layer=1)).out

    return lower(target, run, q, jax.ShapeDtypeStruct(pool, jnp.bfloat16), tables, starts, positions)


def _in_order(shape: StepShape, target: Target, num_blocks: int):
    """Lowers writes and attention, layer by layer, in a donated pool [M, L, B, 2K, H]."""

    def run(pool, q, tables, starts, positions, slots, kv):
        layers, block_size = pool.shape[1:3]
        pages = pool.reshape(-1, *pool.shape[2:])
        for layer in range(layers):
            pages = pages.at[slots // block_size * layers + layer, slots % block_size].set(kv, mode="drop")
            q = tpu_attention.attend_pages(q, pages, tables * layers + layer, starts, positions)
        return pages.reshape(pool.shape), q

    q, tables, starts, positions, slots = tiles(shape)
    heads = (2 * LLAMA.num_kv_heads, LLAMA.head_dim)
    pool = jax.ShapeDtypeStruct((num_blocks, LLAMA.num_layers, BLOCK_SIZE, *heads), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((*slots.shape, *heads), jnp.bfloat16)
    return lower(target, run, pool, q, tables, starts, positions, slots, kv, donate_argnums=0)


def tiles(shape: StepShape):
    """Returns the shapes of q, tables, starts, positions and slots of a step with one part."""
    [(count, width)] = shape.parts
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    q = jax.ShapeDtypeStruct((count, width, LLAMA.num_heads, LLAMA.head_dim), jnp.bfloat16)
    table = ints((count, shape.table_width))
    return q, table, table, ints((count, width)), ints((count * width,))


def lower(target: Target, function, *args, **options):
    with target.described():
        placed = target.placement().everywhere(args)
        return jax.jit(function, **options).trace(*placed).lower(lowering_platforms=("tpu",))


def compile_case(case: Case, target: Target, num_blocks: int = NUM_BLOCKS) -> dict[str, Any]:
    """Compiles a case; returns a row of the report, whose "reason" is the problem, or None."""
    began = time.perf_counter()
    row: dict[str, Any] = {"name": case.name, "config": case.config}
    try:
        lowered = case.lower(target, num_blocks)
        compiled = lowered.compile()
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return row | {"reason": f"{type(error).__name__}: {words[:300]}"}
    program = examine(lowered, compiled)
    about = {"kernels": program.hlo.count('custom_call_target="tpu_custom_call"')}
    reason = "; ".join(program.wrong(case.collectives)) or None
    return row | about | {"reason": reason} | program.plain() | {"seconds": round(time.perf_counter() - began, 2)}


def main(target: str = "v5e", *, only: str = "", as_json: bool = False) -> int:
    """Runs and prints the checks; returns the exit status: 1 if something failed, 2 if the extra is not installed.

    Raises:
      ValueError: no such case.
    """
    if line := tpu_topology.missing():
        print(f"ksana: error: {line}", file=sys.stderr)
        return 2
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ValueError(f"{only!r} is not a regular expression: {error}") from None
    chosen = [case for case in cases() if pattern.search(str(case))]
    if not chosen:
        raise ValueError(f"no case for {target} has {only!r} in its name")
    found, version = find_target(target), importlib.metadata.version("jax")
    kind, libtpu = tpu_topology.TARGETS[target].kind, importlib.metadata.version("libtpu")
    print(f"{kind}, jax {version}, libtpu {libtpu}, {len(chosen)} cases")
    rows = []
    for case in chosen:
        rows.append(row := compile_case(case, found))
        print(case, flush=True)
        if "pool_bytes" in row:
            pool = f"pool {row['pool_bytes']:,} bytes, aliased {row['alias_bytes']:,}, temp {row['temp_bytes']:,}"
            print(f"  {pool}, {row['kernels']} Pallas kernels, {row['seconds']} s")
            if said := describe_exchange(row):
                print(said)
        if row["reason"]:
            print(f"  FAILED: {row['reason']}")
    failed = sum(row["reason"] is not None for row in rows)
    print(f"{len(rows)} reports, {failed} failed")
    if as_json:
        print(json.dumps({"target": target, "jax": version, "kernels": rows, "failed": failed}), flush=True)
    return int(failed > 0)
