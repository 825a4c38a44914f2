"""Writes a model as a Hugging Face directory: config.json, generation_config.json and model.safetensors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.files import replacing, write_atomic
from ksana_jax.core.sources.hub import SINGLE
from ksana_jax.loading.tensor_files import write_tensors
from ksana_jax.loading.views import sources_of
from ksana_jax.models.families import config_to_hf
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.params import Params, is_shape, param_shapes

STORED_DTYPES = ("float32", "bfloat16", "float16")


def export_hf(model_dir: str | os.PathLike[str], config: ModelConfig, params: Params) -> None:
    """Writes a model as a Hugging Face directory, weights in their current dtype.

    Each file is written completely or not at all, the weights last.

    Raises:
      ConfigError: the family's Hugging Face config cannot express this model, or the family has no name for a weight.
      LoadError: params do not fit the config; every difference is listed.
    """
    if any(isinstance(w, Matrix) for w in jax.tree.leaves(params, is_leaf=lambda w: isinstance(w, Matrix))):
        raise LoadError("matrices are in another form than numbers; load the model without quantization to export it")
    values, stored = config_to_hf(config), sources_of(config)
    shapes = jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=is_shape)
    given = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    wanted = {jax.tree_util.keystr(path): shape for path, shape in shapes}
    problems = [f"{name} is missing" for name in wanted if name not in given]
    problems += [f"{name} is not part of the config" for name in given if name not in wanted]
    problems += [
        f"{name} has shape {list(given[name].shape)}, the config gives {list(shape)}"
        for name, shape in wanted.items()
        if name in given and given[name].shape != shape
    ]
    dtypes = sorted({str(leaf.dtype) for leaf in given.values()})
    if len(dtypes) != 1 or dtypes[0] not in STORED_DTYPES:
        problems.append(f"dtypes are {', '.join(dtypes)}; supported: one of {', '.join(STORED_DTYPES)}")
    if problems:
        raise LoadError(f"params do not fit the config: {'; '.join(problems)}")

    directory = Path(model_dir)
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for source, leaf in zip(stored, jax.tree.leaves(params), strict=True):
        source.write(np.asarray(leaf), tensors)
    _replace(directory / "config.json", {**values, "torch_dtype": dtypes[0]})
    # Its ids take precedence over the ids in config.json, so an existing one must not remain.
    _replace(directory / "generation_config.json", {name: values[name] for name in ("bos_token_id", "eos_token_id")})
    with replacing(directory / SINGLE) as file:
        # transformers requires the "format" entry, the framework in whose layout the tensors are.
        write_tensors(file, tensors, {"format": "pt"})


def _replace(path: Path, values: dict[str, Any]) -> None:
    write_atomic(path, json.dumps(values, indent=2) + "\n")
