"""`ksana kernels check --target v5e`: compiles the engine's steps, and jax's own kernel, for an absent TPU.

The steps run the XLA path of attention. jax's kernel is compiled behind the contract, where it needs the visible blocks
gathered, and over a pool that rests in the kernel's own order, where it needs nothing: see `tpu_attention`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.compile_check import tpu_attention
from ksana_jax.config import ModelConfig
from ksana_jax.devices.capabilities import stored_as_bits
from ksana_jax.kv.layout import KVLayout
from ksana_jax.loading.load import abstract_params
from ksana_jax.parallel.placement import Placement
from ksana_jax.patterns import FULL
from ksana_jax.runner.runner import Runner
from ksana_jax.step.contract import Part, StepShape
from pallas_kernels.aot.report import Memory, find_copies, judge_program, part_size
from pallas_kernels.contract import Call, Pool

EXTRA = "aot-tpu"
# By name: topology for libtpu, device as jax calls it, and what libtpu would otherwise look for on the network.
TARGETS = {"v5e": ("v5e:2x2", "TPU v5 lite", "v5litepod-4")}

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
BLOCK_SIZE, NUM_BLOCKS = 64, 4096
TABLE_WIDTH = LLAMA.max_position // BLOCK_SIZE
DECODE, PREFILL = (StepShape((part,), TABLE_WIDTH, max_sampled=8) for part in (Part(8, 1), Part(4, 32)))


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile. lower: (sharding of a device, num_blocks) -> the lowered program."""

    name: str
    config: dict[str, Any]
    lower: Callable[..., Any]

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
    return found


def _step(shape: StepShape, sharding, num_blocks: int):
    """Lowers a step of the engine's own Runner."""
    device = next(iter(sharding.device_set))
    runner = Runner(
        LLAMA,
        placed(sharding, abstract_params(LLAMA, "bf16")),
        (FULL,) * LLAMA.num_layers,
        num_blocks=num_blocks,
        layout=KVLayout.of(LLAMA, dtype="bf16", block_size=BLOCK_SIZE, as_bits=stored_as_bits(device)),
        max_model_len=LLAMA.max_position,
        max_repositioned_sinks=0,
        placement=Placement(device),
    )
    return runner.lower_step(shape)


def _gathered(shape: StepShape, sharding, num_blocks: int):
    """Lowers one layer's attention by jax's kernel behind the contract."""
    q, tables, starts, positions, _ = tiles(shape)
    pool = (num_blocks, LLAMA.num_layers, 2, LLAMA.num_kv_heads, BLOCK_SIZE, LLAMA.head_dim)

    def run(q, kv, tables, starts, positions):  # the pattern is to be known
        return tpu_attention.KERNEL(Call(q, Pool(kv), tables, starts, positions, layer=1)).out

    return lower(sharding, run, q, jax.ShapeDtypeStruct(pool, jnp.bfloat16), tables, starts, positions)


def _in_order(shape: StepShape, sharding, num_blocks: int):
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
    return lower(sharding, run, pool, q, tables, starts, positions, slots, kv, donate_argnums=0)


def tiles(shape: StepShape):
    """Returns the shapes of q, tables, starts, positions and slots of a step with one part."""
    [(count, width)] = shape.parts
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    q = jax.ShapeDtypeStruct((count, width, LLAMA.num_heads, LLAMA.head_dim), jnp.bfloat16)
    table = ints((count, shape.table_width))
    return q, table, table, ints((count, width)), ints((count * width,))


def placed(sharding, arrays):
    """Returns the shapes of a tree of arrays, placed on a TPU."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)


def lower(sharding, function, *args, **options):
    return jax.jit(function, **options).trace(*placed(sharding, args)).lower(lowering_platforms=("tpu",))


def missing() -> str | None:
    """Returns what must be installed to compile for a TPU; None if nothing is missing."""
    if importlib.util.find_spec("libtpu") is not None:
        return None
    return f"compiling for a TPU needs libtpu; install the extra: pip install 'ksana-jax[{EXTRA}]'"


def topology(target: str):
    """Returns a sharding on one device of a target, and a context in which kernels are lowered for it."""
    from jax.experimental import topologies

    name, kind, accelerator = TARGETS[target]
    # Otherwise libtpu asks the network which TPU this is, and complains.
    for key, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }.items():
        os.environ.setdefault(key, value)
    device = topologies.get_topology_desc(name, platform="tpu").devices[0]
    described = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=described)
    return jax.sharding.SingleDeviceSharding(device), jax.sharding.use_abstract_mesh(mesh)


def compile_case(case: Case, target: str, num_blocks: int = NUM_BLOCKS) -> dict[str, Any]:
    """Compiles a case; returns a row of the report, whose "reason" is the problem, or None."""
    began = time.perf_counter()
    row: dict[str, Any] = {"name": case.name, "config": case.config}
    try:
        sharding, described = topology(target)
        with described:
            lowered = case.lower(sharding, num_blocks)
        compiled = lowered.compile()
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return row | {"reason": f"{type(error).__name__}: {words[:300]}"}
    arguments = jax.tree.leaves(lowered.args_info)
    donated = [a for a in arguments if a.donated]
    pools = donated or [max(arguments, key=_num_bytes)]
    stats, hlo = compiled.memory_analysis(), compiled.as_text()
    memory = Memory(
        pool_bytes=sum(map(_num_bytes, pools)),
        part_bytes=min(part_size(x.shape) * x.dtype.itemsize for x in pools),
        donated_bytes=sum(map(_num_bytes, donated)),
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
    wrong = judge_program(memory, find_copies(hlo, [x.shape for x in pools]))
    about = {"kernels": hlo.count('custom_call_target="tpu_custom_call"'), "reason": "; ".join(wrong) or None}
    return row | about | dataclasses.asdict(memory) | {"seconds": round(time.perf_counter() - began, 2)}


def _num_bytes(array) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def main(target: str = "v5e", *, only: str = "", as_json: bool = False) -> int:
    """Runs and prints the checks; returns the exit status: 1 if something failed, 2 if the extra is not installed.

    Raises:
      ValueError: no such case.
    """
    if line := missing():
        print(f"ksana: error: {line}", file=sys.stderr)
        return 2
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ValueError(f"{only!r} is not a regular expression: {error}") from None
    chosen = [case for case in cases() if pattern.search(str(case))]
    if not chosen:
        raise ValueError(f"no case for {target} has {only!r} in its name")
    jax.config.update("jax_platforms", "cpu")  # libtpu is there for its compiler; jax would look for a TPU
    version = importlib.metadata.version("jax")
    print(f"{TARGETS[target][1]}, jax {version}, libtpu {importlib.metadata.version('libtpu')}, {len(chosen)} cases")
    rows = []
    for case in chosen:
        rows.append(row := compile_case(case, target))
        print(case, flush=True)
        if "pool_bytes" in row:
            pool = f"pool {row['pool_bytes']:,} bytes, aliased {row['alias_bytes']:,}, temp {row['temp_bytes']:,}"
            print(f"  {pool}, {row['kernels']} Pallas kernels, {row['seconds']} s")
        if row["reason"]:
            print(f"  FAILED: {row['reason']}")
    failed = sum(row["reason"] is not None for row in rows)
    print(f"{len(rows)} reports, {failed} failed")
    if as_json:
        print(json.dumps({"target": target, "jax": version, "kernels": rows, "failed": failed}), flush=True)
    return int(failed > 0)
