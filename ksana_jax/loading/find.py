"""Finds the weights of a model directory or GGUF file, in whichever format they are stored."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import TensorInfo, gguf_of, read_gguf
from ksana_jax.loading.config_json import read_json
from ksana_jax.loading.gguf_tensors import find_gguf_tensors
from ksana_jax.loading.quantised.find import with_quantised
from ksana_jax.loading.quantised.scheme import read_scheme
from ksana_jax.loading.stored_tensor import StoredTensor
from ksana_jax.loading.tensor_files import find_tensors
from ksana_jax.loading.views import PartOfTensor
from ksana_jax.models.families import FAMILIES
from ksana_jax.models.params import num_params

QUANTISED_NAMES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_proj_blocks")


def find_weights(path: Path, config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Returns the tensors of a model by Hugging Face name; reads no weights.

    Raises:
      LoadError: files are missing or damaged, or parts of a quantised matrix do not belong together.
      ConfigError: matrices are quantised in a format that is not supported.
    """
    if (gguf := gguf_of(path)) is not None:
        file = read_gguf(gguf)
        _check_size(config, file.tensors.values(), gguf)
        return find_gguf_tensors(file, config)
    found, source = _renamed(find_tensors(path), config), path / "config.json"
    _check_size(config, found.values(), path)
    scheme = read_scheme(read_json(source), str(source))
    if scheme is not None:
        return with_quantised(found, scheme, config, str(path))
    if name := next((name for name in found if name.endswith(QUANTISED_NAMES)), None):
        raise LoadError(
            f"{path} has quantised tensors, such as {name}, but its config.json has no quantization_config; add "
            "it, for example the contents of quantize_config.json with a quant_method"
        )
    return found


def _check_size(config: ModelConfig, tensors: Iterable[StoredTensor | TensorInfo], path: Path) -> None:
    """Checks that files can have all weights of a config, before anything of the config's sizes is made.

    Raises:
      LoadError: they have too few numbers, even if each has eight codes of quantised weights.
    """
    if (needed := num_params(config)) > (most := 8 * sum(math.prod(stored.shape) for stored in tensors)):
        raise LoadError(f"{path}: the config gives {needed:,} weights, the tensors of its files at most {most:,}")


def _renamed(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Returns tensors by the names that the config's family uses, where versions of transformers write others."""
    found: dict[str, StoredTensor] = {}
    for name, stored in tensors.items():
        name = usual_name(name, config)
        if name in found:
            raise LoadError(f"{stored.path}: {stored.name} and {found[name].name} are the same tensor, {name}")
        found[name] = stored
    found = _apart(found, config)
    names = FAMILIES[config.family].top_names
    if config.tie_embeddings and names["embed"] not in found and names["head"] in found:
        # safetensors' save_model keeps one name of a shared tensor, the head's.
        found[str(names["embed"])] = found.pop(str(names["head"]))
    return found


def _apart(found: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Returns tensors with those of each expert apart, where a family has them so and a file has stacks [E, out, in],
    of gate and up together."""
    names, apart = FAMILIES[config.family].layer_names.values(), {}
    if config.experts is None or "mlp.experts.{}.down_proj.weight" not in names:
        return found
    for name, x in found.items():
        prefix, _, kind = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        num_rows = config.d_ff if len(parts) == 2 else config.d_model
        if not parts or x.shape[:-1] != (config.experts.num_experts, num_rows * len(parts)):
            apart[name] = x
            continue
        for at, part in enumerate(parts):
            rows, shape = np.arange(at * num_rows, (at + 1) * num_rows), (num_rows, x.shape[-1])
            of_one = functools.partial(PartOfTensor, x.path, x.name, x.dtype, shape, x, rows, False)
            apart |= {f"{prefix}.experts.{e}.{part}.weight": of_one(e) for e in range(x.shape[0])}
    return apart


def usual_name(name: str, config: ModelConfig) -> str:
    """Returns the name that the config's family uses for a tensor, where versions of transformers write others."""
    for other, usual in FAMILIES[config.family].renamed.items():
        name = re.sub(f"^{other}", usual, name)
    return name
