"""`ksana kernels check`: compiles the kernels, and whole steps of the engine, for an absent GPU."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

from ksana_jax.compile_check import tpu
from ksana_jax.config import ModelConfig
from ksana_jax.devices.capabilities import stored_as_bits
from ksana_jax.kv.layout import KVLayout
from ksana_jax.loading.load import abstract_params
from ksana_jax.operator_settings import OperatorSettings
from ksana_jax.parallel.placement import Placement
from ksana_jax.patterns import FULL
from ksana_jax.runner.runner import Runner
from ksana_jax.step.contract import Part, StepShape
from pallas_kernels import aot
from pallas_kernels.aot.check import SOURCES, Case, check

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    d_model=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    d_ff=14_336,
    max_position=8192,
)
BLOCK_SIZE = 64


# Decode of one row and of 64 rows; 32 rows with eight tiles of prompts, 64 tokens each.
TABLE_WIDTH = LLAMA_8B.max_position // BLOCK_SIZE
SHAPES = tuple(
    StepShape(parts, TABLE_WIDTH, max_sampled=parts[0].count)
    for parts in ((Part(1, 1),), (Part(64, 1),), (Part(32, 1), Part(8, 64)))
)
# Blocks of a pool in 8 bits, and in bfloat16, where they are 32 GiB. For copies to be told apart, a layer's scales must
# be more than a step's buffers, and as large as no weight.
NUM_BLOCKS = (24_001, 4096)


def cases(target: aot.Target) -> list[Case]:
    """Returns steps of a Llama-8B shape in bfloat16, rows of up to 8k tokens, by implementation of paged attention, and
    on Hopper also with keys and values in 8 bits."""
    used, *others = ("hopper", "triton", "xla") if target.hopper else ("triton", "xla")
    chosen = [(used, shape, "bf16") for shape in SHAPES] + [(other, SHAPES[1], "bf16") for other in others]
    if target.hopper:
        chosen += [("hopper", SHAPES[2], kv) for kv in ("int8", "fp8_e4m3")]
    return [
        Case(
            "step of Llama-8B",
            {"attention": attention, "rows": shape.parts[0].count, "tiles": shape.num_tiles - shape.parts[0].count}
            | ({} if kv == "bf16" else {"kv": kv}),
            functools.partial(step, attention=attention, shape=shape, kv=kv, num_blocks=NUM_BLOCKS[kv == "bf16"]),
        )
        for attention, shape, kv in chosen
    ]


def step(target: aot.Target, *, attention: str, shape: StepShape, kv: str = "bf16", num_blocks: int = 4096):
    """Lowers a step of the engine's own Runner. kv: how keys and values are stored."""
    params = aot.placed(target, abstract_params(LLAMA_8B, "bf16"))
    device = aot.device(target)
    runner = Runner(
        LLAMA_8B,
        params,
        (FULL,) * LLAMA_8B.num_layers,
        num_blocks=num_blocks,
        layout=KVLayout.of(LLAMA_8B, dtype=kv, block_size=BLOCK_SIZE, as_bits=stored_as_bits(device)),
        max_model_len=LLAMA_8B.max_position,
        max_repositioned_sinks=0,
        settings=OperatorSettings(attention=attention),
        placement=Placement(device),
    )
    with aot.described(target):
        return runner.lower_step(shape)


def main(target: str, *, only: str, as_json: bool) -> int:
    """Runs and prints the checks; returns the exit status: 1 if something failed, 2 if the extra is not installed.

    Raises:
      ValueError: no such target, no such case.
    """
    if target in tpu.TARGETS:
        return tpu.main(target, only=only, as_json=as_json)
    if target not in (known := aot.targets()):  # said before anything that is not installed
        raise ValueError(f"unknown target {target!r}; there are {', '.join(sorted([*known, *tpu.TARGETS]))}")
    if line := aot.missing():
        print(f"ksana: error: {line}", file=sys.stderr)
        return 2
    found: dict[str, Any] = check(target, only=only, sources=(*SOURCES, "ksana_jax.compile_check.kernels:cases"))
    if as_json:
        print(json.dumps(found), flush=True)
    return int(found["failed"] > 0)
