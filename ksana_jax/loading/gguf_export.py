"""Writes a model as a GGUF file whose matrices are rounded to blocks.

Metadata is copied from a GGUF file, or made from a config. It is then read again and compared, so that anything GGUF
cannot express is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.gguf_file import SUFFIX, TYPES, GGUFFile, TensorInfo, gguf_of, read_gguf
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.sources import model_path
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.gguf_config import (
    ARCHITECTURES,
    EPS,
    EXPERT_COUNT,
    EXPERT_WIDTH,
    EXPERTS_USED,
    SHARED_WIDTH,
    SIZES,
    SOFT_CAPS,
    WIDTHS,
    WINDOW,
    gguf_config,
)
from ksana_jax.loading.gguf_families import LATENTS, LAYER_NORMS, OWN
from ksana_jax.loading.gguf_tensors import (
    LAYER_NAMES,
    ROPE_FACTORS,
    TOP_NAMES,
    layer_names,
    permuted_heads,
)
from ksana_jax.loading.gguf_writer import QUANTISED, NewTensor, import_gguf, write_gguf
from ksana_jax.loading.load import check_tensors, read_weight
from ksana_jax.loading.views import sources_of
from ksana_jax.models.frequencies import make_rope
from ksana_jax.models.params import is_shape, param_shapes, stated
from ksana_jax.native.shapes import BLOCK
from ksana_jax.tokenizers.gguf_tokens import gguf_tokens

# Type of the embedding and the head: every logit depends on them.
OF_VOCABULARY = "Q8_0"
_PROJ_NORMS = {f"{name}_proj_norm": LAYER_NAMES[f"{name}_norm"] for name in "qk"}
# Keys about the weights of the file that a file was made from, or its parts.
_NOT_COPIED = ("general.file_type", "general.quantization_version", "general.alignment", "split.")


def export_gguf(source: str | os.PathLike[str], out: Path, kind: str) -> None:
    """Writes a model as a GGUF file, with one weight in memory at a time.

    Matrices of layers are rounded to a type of blocks, embedding and head to Q8_0. Other weights are float32, as are
    matrices whose rows are not whole blocks.

    Args:
      source: path or name of a model, a Hugging Face directory or a GGUF file.
      kind: a type of `gguf_writer.QUANTISED`.

    Raises:
      ConfigError: GGUF, or this package's reader, has no name for a part of the model.
      TokenizerError: its tokenizer cannot be expressed.
      LoadError: files cannot be used, or a weight exceeds the range of a scale.
      ImportError: the package gguf is not installed.
    """
    import_gguf()
    if kind not in QUANTISED:
        raise ConfigError(f"kind is {kind!r:.40}, must be one of {', '.join(QUANTISED)}")
    if out.suffix != SUFFIX:
        raise ConfigError(f"{out} must end in {SUFFIX}, by which GGUF files are known")
    path, config = model_path(source), _with_factors(load_config(source))
    file = read_gguf(gguf) if (gguf := gguf_of(path)) else None
    found = find_weights(path, config)
    check_tensors(config, found, str(source))
    if file:
        architecture = file.metadata["general.architecture"]
        metadata = {k: v for k, v in file.metadata.items() if not k.startswith(_NOT_COPIED)}
    else:
        architecture, metadata = config_metadata(config)
        metadata |= gguf_tokens(path, config.vocab_size, config.bos_id, config.eos_ids)
    metadata["general.quantization_version"] = 2  # of ggml's blocks
    heads = permuted_heads(architecture, config)
    tensors: dict[str, NewTensor] = {}
    names = layer_names(config) | _PROJ_NORMS
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=is_shape)
    for (where, shape), of_weight in zip(leaves, sources_of(config), strict=True):
        field, layer = where[-1].name, where[1].idx if where[0].name == "layers" else None
        if (name := (TOP_NAMES if layer is None else names).get(field)) is None:
            raise ConfigError(f"{source}: GGUF files have no name here for the weight {field}")
        if of_weight.rows is not None:
            raise ConfigError(
                f"{source}: {field} has rows of {next(iter(of_weight.tensors))} in an order of its own; "
                f"quantize writes only weights that are whole tensors, not {config.family}"
            )
        name = name if layer is None else f"blk.{layer}.{name}"
        to = kind if stated(field, "quantization").quantises else "F32"
        if field in ("embed", "head"):
            to = OF_VOCABULARY
        stored, shape = of_weight.of(found), shape[1:] if field == "w_shared_gate" else shape
        plus_one = config.norm == "rms_plus_one" and field.endswith("norm")
        values = functools.partial(_values, stored, shape, heads.get(field), plus_one)
        tensors[name] = NewTensor("F32" if len(shape) < 2 or shape[-1] % BLOCK else to, shape, values)
    if not file:
        _check_config(config, metadata, tensors, out)
    if isinstance(config.rope, RopeConfig) and config.rope.factors:
        factors = np.array(config.rope.factors, np.float32)
        tensors[ROPE_FACTORS] = NewTensor("F32", factors.shape, lambda: factors)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(out, metadata, tensors)


def _with_factors(config: ModelConfig) -> ModelConfig:
    """Returns a config whose rope, if Llama 3.1 stretches it, is given by divisors of its frequencies, as in GGUF."""
    rope = config.rope
    if not isinstance(rope, RopeConfig) or rope.kind != "llama3":
        return config
    plain, stretched = (make_rope(r, config.head_dim).inv_freq for r in (RopeConfig(theta=rope.theta), rope))
    factors = (np.asarray(plain) / np.asarray(stretched)).astype(np.float64)
    return dataclasses.replace(config, rope=RopeConfig("factors", rope.theta, factors=tuple(factors.tolist())))


def _values(stored: list[Any], shape: tuple[int, ...], num_heads: int | None, plus_one: bool) -> np.ndarray:
    """Returns a weight as GGUF has it; num_heads and plus_one as in `GGUFTensor`."""
    values = read_weight(stored, shape, np.float32)
    if num_heads:
        values = values.reshape(num_heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
    return values + np.float32(1) if plus_one else values


# Architectures that are read and not written.
WITHOUT = (*OWN, *LAYER_NORMS, *LATENTS, "granitemoe")


def config_metadata(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Returns the architecture and the keys of a config.

    Raises:
      ConfigError: GGUF has no name for its family here.
    """
    names = {family: name for name, family in ARCHITECTURES.items() if name not in WITHOUT}
    names |= {"mistral": "llama", "mixtral": "llama"}
    if config.family not in names:
        raise ConfigError(f"GGUF files have no architecture here for {config.family}; supported: {', '.join(names)}")
    ropes = config.rope if isinstance(config.rope, tuple) else (config.rope,)
    patterns = config.pattern if isinstance(config.pattern, tuple) else (config.pattern,)
    # Only Gemma 3 has several: layers without a window have the rope that is scaled.
    rope = next((rope for rope, pattern in zip(ropes, patterns * len(ropes)) if pattern.window is None), ropes[0])
    keys: dict[str, Any] = dict(
        zip(SIZES, (config.max_position, config.d_model, config.num_layers, config.d_ff, config.num_heads), strict=True)
    )
    keys |= {"attention.head_count_kv": config.num_kv_heads, EPS: config.norm_eps, "rope.freq_base": rope.theta}
    keys |= dict.fromkeys(WIDTHS[:3], config.head_dim)
    if (experts := config.experts) is not None:
        keys |= {EXPERT_COUNT: experts.num_experts, EXPERTS_USED: experts.num_chosen}
        if names[config.family].startswith("qwen"):
            keys |= {EXPERT_WIDTH: config.d_ff, SHARED_WIDTH: experts.shared_d_ff}
    if rope.kind not in ("default", "factors"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn" and rope.original_max_len:
        keys["rope.scaling.original_context_length"] = rope.original_max_len
    optional = {WINDOW: max(pattern.window or 0 for pattern in patterns)}
    optional |= dict(zip(SOFT_CAPS, (config.soft_cap, config.logit_soft_cap)))
    keys |= {key: value for key, value in optional.items() if value}
    architecture = names[config.family]
    named = {f"{architecture}.{key}": value for key, value in keys.items()}
    return architecture, {"general.architecture": architecture, "general.type": "model", **named}


def _check_config(config: ModelConfig, metadata: dict[str, Any], tensors: dict[str, NewTensor], out: Path) -> None:
    """Checks that reading the metadata gives the config; the divisors of a rope are a tensor."""
    if isinstance(config.rope, RopeConfig) and config.rope.factors:
        config = dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))
    kinds = {kind.name: kind for kind in TYPES.values()}
    infos = {name: TensorInfo(out, name, kinds[t.kind], t.shape, 0) for name, t in tensors.items()}
    found = gguf_config(GGUFFile(out, metadata, infos))
    # A Mistral without windows is a Llama.
    differ = [f.name for f in dataclasses.fields(config) if getattr(found, f.name) != getattr(config, f.name)]
    # `gguf_tokens` keeps the ids of the tokenizer and all that end a text; a GGUF file may have more.
    if differ := [name for name in differ if name not in ("family", "bos_id", "eos_ids")]:
        told = ", ".join(f"{name} {getattr(config, name)!r:.60} became {getattr(found, name)!r:.60}" for name in differ)
        raise ConfigError(f"GGUF cannot express this config: {told}")
