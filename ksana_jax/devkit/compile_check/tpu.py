"""`ksana kernels check --target v5e`: compiles the engine's steps for an absent TPU, which run attention by XLA."""

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

from ksana_jax.core.config import ModelConfig
from ksana_jax.devkit.compile_check import tpu_topology
from ksana_jax.devkit.compile_check.models import LLAMA_8B, SHAPES, sizes_of
from ksana_jax.devkit.compile_check.steps import BLOCK_SIZE, collectives_of_step, lower_step
from ksana_jax.devkit.compile_check.targets import Target, find_target
from ksana_jax.scheduler.step.types import Part, StepShape
from pallas_kernels.aot.program import examine
from pallas_kernels.aot.report import Collective, describe_exchange

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

    lower: (target) -> the lowered program. collectives: see `pallas_kernels.aot.check.Case`.
    """

    name: str
    config: dict[str, Any]
    lower: Callable[[Target], Any]
    collectives: Counter[Collective] | None = None

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.config.items())])


def cases() -> list[Case]:
    found = []
    for phase, shape in (("decode", DECODE), ("prefill", PREFILL)):
        step = functools.partial(lower_step, model=LLAMA, shape=shape, num_blocks=NUM_BLOCKS)
        found.append(Case("step of a small Llama", {"phase": phase}, step))
    for num_devices, num_blocks in DIVIDED:
        shape, settings = SHAPES[1], {"num_devices": num_devices, "num_blocks": num_blocks}
        step = functools.partial(lower_step, model=LLAMA_8B, shape=shape, **settings)
        expected = collectives_of_step(LLAMA_8B, shape, num_devices)
        found.append(Case("step of Llama-8B", {"devices": num_devices} | sizes_of(shape), step, expected))
    return found


def compile_case(case: Case, target: Target) -> dict[str, Any]:
    """Compiles a case; returns a row of the report, whose "reason" is the problem, or None."""
    began = time.perf_counter()
    row: dict[str, Any] = {"name": case.name, "config": case.config}
    try:
        lowered = case.lower(target)
        compiled = lowered.compile()
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return row | {"reason": f"{type(error).__name__}: {words[:300]}"}
    program = examine(lowered, compiled)
    reason = "; ".join(program.wrong(case.collectives)) or None
    return row | {"reason": reason} | program.plain() | {"seconds": round(time.perf_counter() - began, 2)}


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
            print(f"  {pool}, {row['seconds']} s")
            if said := describe_exchange(row):
                print(said)
        if row["reason"]:
            print(f"  FAILED: {row['reason']}")
    failed = sum(row["reason"] is not None for row in rows)
    print(f"{len(rows)} reports, {failed} failed")
    if as_json:
        print(json.dumps({"target": target, "jax": version, "kernels": rows, "failed": failed}), flush=True)
    return int(failed > 0)
