"""Cases of whole steps of the engine."""

from __future__ import annotations

import functools
from typing import Any

from ksana_jax.core.config import ModelConfig
from ksana_jax.methods.eviction.h2o import H2O
from ksana_jax.scheduler.step.shared_prefix import SHARED_ROWS
from ksana_jax.scheduler.step.types import StepShape
from pallas_kernels import aot
from tests.kernel_report.check import Case
from tests.kernel_report.models import LATENTS, LLAMA_8B, MODELS, QWEN3_MOE, SHAPES, sizes_of
from tests.kernel_report.steps import collectives_of_step, lower_sampling, lower_step

# Blocks of a pool in 8 bits, and in bfloat16, where they are 32 GiB. For copies to be told apart, a layer's scales must
# be more than a step's buffers, and as large as no weight.
NUM_BLOCKS = (28_001, 4096)
# The same for pools with scores of tokens, whose rows have up to 2k tokens.
NUM_SCORED_BLOCKS, SCORED_WIDTH = 14_000, 32

# Models divided among devices of a host: by name, with their numbers of devices.
DIVIDED = (("Llama-8B", 2), ("Llama-8B", 8), ("Llama-70B", 8))


def cases(target: aot.Target) -> list[Case]:
    """Returns steps of a Llama-8B shape in bfloat16, rows of up to 8k tokens, by implementation of paged attention, and
    on Hopper also with keys and values in 8 bits; and steps of models that several devices divide."""
    used, *others = ("hopper", "triton", "xla") if target.hopper else ("triton", "xla")
    chosen = [(used, shape, "bf16") for shape in SHAPES] + [(other, SHAPES[1], "bf16") for other in others]
    if target.hopper:
        chosen += [("hopper", SHAPES[2], kv) for kv in ("int8", "fp8_e4m3")]
    found = []
    for attention, shape, kv in chosen:
        config = {"attention": attention} | sizes_of(shape) | ({} if kv == "bf16" else {"kv": kv})
        step = functools.partial(_step, shape=shape, attention=attention, kv=kv)
        found.append(Case("step of Llama-8B", config, step))
    if target.hopper:
        found += _with_options()
        for shape in SHAPES[1:3]:
            step = functools.partial(_step, shape=shape, model=LATENTS, attention="hopper")
            found.append(Case("step of DeepSeek-V2", {"attention": "hopper"} | sizes_of(shape), step))
    for shape in SHAPES[:2]:
        step = functools.partial(_step, shape=shape, model=QWEN3_MOE, attention=used)
        found.append(Case("step of Qwen3-MoE", {"attention": used} | sizes_of(shape), step))
    rows = SHAPES[1].parts[0].count
    for name, num_devices in DIVIDED:
        shape, divided = SHAPES[2], {"model": MODELS[name], "num_devices": num_devices}
        config = {"attention": used, "devices": num_devices}
        step = functools.partial(_step, shape=shape, attention=used, **divided)
        expected = collectives_of_step(MODELS[name], shape, num_devices)
        found.append(Case(f"step of {name}", config | sizes_of(shape), step, expected))
        sampling = functools.partial(_sampling, rows=rows, **divided)
        found.append(Case(f"sampling of {name}", {"devices": num_devices, "rows": rows}, sampling))
    return found


def _with_options() -> list[Case]:
    """Returns decode steps whose rows share blocks, and whose attention returns the weight that each slot got."""
    sharing, weighing = SHAPES[1]._replace(shared_rows=SHARED_ROWS), SHAPES[1]._replace(table_width=SCORED_WIDTH)
    evicting = {"eviction": H2O(), "num_blocks": NUM_SCORED_BLOCKS}
    sizes, found = sizes_of(SHAPES[1]), []
    logits_bytes = 4 * sizes["rows"] * LLAMA_8B.vocab_size  # more than a layer's scores of tokens
    for shape, option, settings, buffer_bytes in (
        (sharing, {"shared_rows": SHARED_ROWS}, {}, 0),
        (weighing, {"kv_eviction": "h2o"}, evicting, logits_bytes),
    ):
        step = functools.partial(_step, shape=shape, attention="hopper", **settings)
        config = {"attention": "hopper"} | sizes | option
        found.append(Case("step of Llama-8B", config, step, buffer_bytes=buffer_bytes))
    return found


def _step(target: aot.Target, *, shape: StepShape, model: ModelConfig = LLAMA_8B, kv: str = "bf16", **settings: Any):
    settings = {"num_blocks": NUM_BLOCKS[kv == "bf16"]} | settings
    return lower_step(target, model, shape, kv=kv, **settings)


def _sampling(target: aot.Target, *, model: ModelConfig, rows: int, num_devices: int):
    return lower_sampling(target, model, rows, num_devices=num_devices)
