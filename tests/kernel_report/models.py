"""Shapes of models and of steps that are compiled for absent hardware."""

from __future__ import annotations

import dataclasses

from experiments.gpu.llama import LLAMA_8B
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec, LatentSpec, RopeConfig, rotated_part
from ksana_jax.core.recurrent import DeltaRuleSpec
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from tests.kernel_report.steps import BLOCK_SIZE

LLAMA_70B = dataclasses.replace(LLAMA_8B, d_model=8192, num_layers=80, num_heads=64, d_ff=28_672)
# Four of the 48 layers of Qwen3-30B-A3B.
QWEN3_MOE = ModelConfig(
    family="qwen3_moe",
    vocab_size=151_936,
    d_model=2048,
    num_layers=4,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    d_ff=768,
    qk_norm="head",
    mlp="swiglu_experts",
    experts=ExpertsSpec(num_experts=128, num_chosen=8),
    max_position=8192,
)
# Latents of DeepSeek-V2-Lite, four layers, without its experts.
LATENTS = ModelConfig(
    family="deepseek_v2",
    vocab_size=102_400,
    d_model=2048,
    num_layers=4,
    num_heads=16,
    num_kv_heads=1,
    head_dim=576,
    d_ff=10_944,
    latent=LatentSpec(rank=512, rotated=64, plain=128, value=128),
    attention_scale=192**-0.5,
    rope=RopeConfig(partial_rotary_factor=rotated_part(512, 64)),
    max_position=8192,
)
# Qwen3-Next-80B without its experts, three gated delta rules and a layer of attention.
HYBRID = ModelConfig(
    family="qwen3_5_text",
    vocab_size=49_152,
    d_model=2048,
    num_layers=4,
    num_heads=16,
    num_kv_heads=2,
    head_dim=256,
    d_ff=5120,
    recurrent=DeltaRuleSpec((0, 1, 2), 16, 32, 128, 128),
    max_position=8192,
)
MODELS = {"Llama-8B": LLAMA_8B, "Llama-70B": LLAMA_70B}

# Decode of one row and of 64 rows; 32 rows with eight tiles of prompts, 64 tokens each; decode of eight rows, the
# fewest that an engine computes on a GPU.
TABLE_WIDTH = LLAMA_8B.max_position // BLOCK_SIZE
SHAPES = tuple(
    StepShape(parts, TABLE_WIDTH, max_sampled=parts[0].count)
    for parts in ((TileGroup(1, 1),), (TileGroup(64, 1),), (TileGroup(32, 1), TileGroup(8, 64)), (TileGroup(8, 1),))
)


def sizes_of(shape: StepShape) -> dict[str, int]:
    """Returns the rows and tiles of a step, as a report names them."""
    rows = shape.parts[0].count
    return {"rows": rows, "tiles": shape.num_tiles - rows}
