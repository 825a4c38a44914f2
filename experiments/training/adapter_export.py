"""Writes adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.numpy

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.files import write_atomic
from ksana_jax.loading.adapter import CONFIG, PREFIX, WEIGHTS, modules_of


class LowRankPair(NamedTuple):
    """The two matrices of a module: its weight W [out, in] becomes W + (alpha / r) B A."""

    a: np.ndarray  # [r, in]
    b: np.ndarray  # [out, r]


def export_adapter(folder: Path, pairs: Mapping[str, LowRankPair], rank: int, alpha: float, base: str = "") -> None:
    """Writes a LoRA adapter.

    Args:
      pairs: by the names of modules, such as "model.layers.0.self_attn.q_proj" (`adapter.modules_of`).
      base: the name or path of the model, for readers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{PREFIX}{name}.lora_{kind}.weight": np.ascontiguousarray(values)
        for name, pair in pairs.items()
        for kind, values in (("A", pair.a), ("B", pair.b))
    }
    write_atomic(folder / WEIGHTS, safetensors.numpy.save(tensors, metadata={"format": "pt"}))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(pairs),
        "bias": "none",
        "inference_mode": True,
    }
    write_atomic(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


def random_adapter(config: ModelConfig, rank: int, seed: int, std: float = 0.02) -> dict[str, LowRankPair]:
    """Returns normal numbers for all modules of a model that adapters may change."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (std * rng.standard_normal(shape)).astype(np.float32)

    return {name: LowRankPair(draw(rank, m.columns), draw(m.rows, rank)) for name, m in modules_of(config).items()}
