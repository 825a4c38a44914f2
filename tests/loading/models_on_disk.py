"""Small checkpoints for the tests of loading, and the means to spoil them."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

from ksana_jax.core.config import ModelConfig
from ksana_jax.loading.views import sources_of
from ksana_jax.models.families import config_to_hf

TINY = ModelConfig(
    vocab_size=32,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=24,
    max_position=64,
    bos_id=1,
    eos_ids=(2,),
)
STORED = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


def random_tensors(config: ModelConfig, stored: str = "F32", seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by their Hugging Face names."""
    rng = np.random.default_rng(seed)
    shapes = {name: shape for weight in sources_of(config) for name, shape in weight.tensors.items()}
    return {name: rng.standard_normal(shape, np.float32).astype(STORED[stored]) for name, shape in shapes.items()}


def write_config(folder: Path, config: ModelConfig = TINY, **changes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_to_hf(config) | changes))


def write_model(folder: Path, tensors: dict[str, np.ndarray], config: ModelConfig = TINY, **changes) -> Path:
    """A model in one file."""
    write_config(folder, config, **changes)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: dict[str, np.ndarray], config: ModelConfig = TINY, num_shards: int = 3) -> Path:
    """A model in several files with an index."""
    write_config(folder, config)
    weight_map = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[shard::num_shards]}
        safetensors.numpy.save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
