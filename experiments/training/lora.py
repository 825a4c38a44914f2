"""Training of an adapter: two small matrices next to each target matrix of a model whose own weights stay as they are.

Source: LoRA, arXiv:2106.09685, section 4.1. A starts as PEFT's does, and B as zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.training.adapter_export import LowRankPair, export_adapter
from experiments.training.settings import LoraSettings, TrainConfig
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.loading.adapter import modules_of
from ksana_jax.models.params import Params

# An adapter by the names of its modules.
Adapter = Mapping[str, LowRankPair]


def first_adapter(lora: LoraSettings, config: ModelConfig, seed: int) -> dict[str, LowRankPair]:
    """Returns the adapter before the first step, in float32, which changes nothing yet.

    Raises:
      ConfigError: a target is no module of the model.
    """
    modules, rng, found = modules_of(config), np.random.default_rng(seed), {}
    for target in lora.target_modules:
        names = [name for name in modules if re.fullmatch(rf"(.*\.)?{re.escape(target)}", name)]
        if not names:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
            raise ConfigError(f"lora.target_modules has {target!r}, the model's modules are {known}")
        found |= {name: modules[name] for name in names}
    pairs = {}
    for name, module in sorted(found.items()):
        limit = module.columns**-0.5
        a = rng.uniform(-limit, limit, (lora.rank, module.columns))
        pairs[name] = LowRankPair(jnp.asarray(a, jnp.float32), jnp.zeros((module.rows, lora.rank), jnp.float32))  # pyright: ignore[reportArgumentType]
    return pairs


def merged(base: Params, adapter: Adapter, lora: LoraSettings, config: ModelConfig) -> Params:
    """Returns the weights W + (alpha / rank) B A, in float32."""
    modules, layers = modules_of(config), list(base.layers)
    for name, (a, b) in adapter.items():
        for layer, field, rows in modules[name].fields:
            w = getattr(layers[layer], field)
            product = jnp.matmul(b if rows is None else b[rows], a, precision="highest")
            layers[layer] = layers[layer].replace(**{field: w + lora.alpha / lora.rank * product})  # pyright: ignore[reportAttributeAccessIssue]
    return base.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def export_trained(folder: Path, config: TrainConfig, adapter: Adapter) -> None:
    """Writes the adapter as PEFT saves one."""
    assert config.lora is not None
    export_adapter(folder, jax.device_get(dict(adapter)), config.lora.rank, config.lora.alpha, config.init_from or "")
