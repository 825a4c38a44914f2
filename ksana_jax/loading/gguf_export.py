"""Writes a model as a GGUF file, in floats or with matrices rounded to blocks.

Metadata is copied from a GGUF file, or made from a config. It is then read again and compared, so that anything GGUF
cannot express is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.gguf_file import SUFFIX, TYPES, GGUFFile, TensorInfo, gguf_of, read_gguf
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.recurrent import DeltaRuleSpec
from ksana_jax.core.sources import model_path
from ksana_jax.core.sources.hub import TOKENIZERS
from ksana_jax.loading.config_json import load_config
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.gguf_config import (
    ARCHITECTURES,
    EPS,
    EXPERT_COUNT,
    EXPERT_WIDTH,
    EXPERTS_USED,
    SHARED,
    SHARED_WIDTH,
    SIZES,
    SOFT_CAPS,
    WIDTHS,
    WINDOW,
    gguf_config,
)
from ksana_jax.loading.gguf_families import LAYER_NORMS, OWN
from ksana_jax.loading.gguf_hybrids import GROUPED, RECURRENT, keys_of, row_order, stored_shape, without_guessing
from ksana_jax.loading.gguf_tensors import (
    LAYER_NAMES,
    ROPE_FACTORS,
    SHARED_NAMES,
    adds_one,
    is_tiled,
    layer_names,
    permuted_heads,
    top_names,
)
from ksana_jax.loading.gguf_writer import FLOATS, QUANTISED, NewTensor, import_gguf, write_gguf
from ksana_jax.loading.load import check_tensors, read_weight
from ksana_jax.loading.views import WeightSource, sources_of
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

    Matrices of layers are of the type that is asked for; if it has blocks, embedding and head are Q8_0. Other weights
    are float32, as are matrices whose rows are not whole blocks. A directory without a tokenizer gives such a file,
    which names no ids either.

    Args:
      source: path or name of a model, a Hugging Face directory or a GGUF file.
      kind: a type of `gguf_writer.FLOATS` or `gguf_writer.QUANTISED`.

    Raises:
      ConfigError: GGUF, or this package's reader, has no name for a part of the model.
      TokenizerError: its tokenizer cannot be expressed.
      LoadError: files cannot be used, or a weight exceeds the range of a scale.
      ImportError: the package gguf is not installed.
    """
    import_gguf()
    if kind not in (*FLOATS, *QUANTISED):
        raise ConfigError(f"kind is {kind!r:.40}, must be one of {', '.join((*FLOATS, *QUANTISED))}")
    if out.suffix != SUFFIX:
        raise ConfigError(f"{out} must end in {SUFFIX}, by which GGUF files are known")
    path, config = model_path(source), _with_factors(load_config(source))
    file = read_gguf(gguf) if (gguf := gguf_of(path)) else None
    found = find_weights(path, config)
    check_tensors(config, found, str(source))
    if file:
        architecture = file.metadata["general.architecture"]
        metadata = {k: v for k, v in file.metadata.items() if not k.startswith(_NOT_COPIED)}
        metadata = without_guessing(metadata, architecture, config) if config.recurrent else metadata
    else:
        architecture, metadata = config_metadata(config)
        if any((path / name).exists() for name in TOKENIZERS):
            metadata |= gguf_tokens(path, config.vocab_size, config.bos_id, config.eos_ids)
        else:
            metadata |= {"tokenizer.ggml.model": "no_vocab", f"{architecture}.vocab_size": config.vocab_size}
    metadata["general.quantization_version"] = 2  # of ggml's blocks
    heads = permuted_heads(architecture, config)
    tensors: dict[str, NewTensor] = {}
    names, plain_layers = layer_names(config) | _PROJ_NORMS, config.experts.plain_layers if config.experts else ()
    own_names = {field: name for name, fields in RECURRENT.get(config.family, {}).items() for field in fields}
    parts: dict[str, dict[str, _Part]] = {}
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(config), is_leaf=is_shape)
    for (where, shape), of_weight in zip(leaves, sources_of(config), strict=True):
        field, layer = where[-1].name, where[1].idx if where[0].name == "layers" else None
        of_this = top_names(config) if layer is None else names
        if layer in plain_layers:
            of_this = of_this | {field: LAYER_NAMES[field] for field in SHARED_NAMES}
        if own := layer is not None and config.layers[layer].recurrent is not None:
            of_this = of_this | own_names
        if (name := of_this.get(field)) is None:
            raise ConfigError(f"{source}: GGUF files have no name here for the weight {field}")
        if of_weight.rows is not None and config.recurrent is None and config.latent is None:
            raise ConfigError(
                f"{source}: {field} has rows of {next(iter(of_weight.tensors))} in an order of its own; "
                f"quantize writes only weights that are whole tensors, not {config.family}"
            )
        name = name if layer is None else f"blk.{layer}.{name}"
        read = functools.partial(_values, config, field, of_weight.of(found), shape, None if own else heads.get(field))
        parts.setdefault(name, {})[field] = shape, of_weight, read
    for name, fields in parts.items():
        to = kind if all(stated(field, "quantization").quantises for field in fields) else "F32"
        if fields.keys() & {"embed", "head"}:
            to = kind if kind in FLOATS else OF_VOCABULARY
        shape, values = _tensor(config, name, fields)
        fits = len(shape) > 1 and (to in FLOATS or shape[-1] % BLOCK == 0)
        tensors[name] = NewTensor(to if fits else "F32", shape, values)
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


# The shape of a weight, its place in a checkpoint, and a function that reads it.
_Part = tuple[tuple[int, ...], WeightSource, Callable[[], np.ndarray]]


def _tensor(config: ModelConfig, name: str, parts: Mapping[str, _Part]) -> tuple[tuple[int, ...], Callable[[], Any]]:
    """Returns the shape of a tensor, and a function that reads its weights and returns them as GGUF has them."""
    layer, base = name.split(".", 2)[1:] if name.startswith("blk.") else (None, name)
    recurrent = layer is not None and config.layers[int(layer)].recurrent is not None
    fields = RECURRENT[config.family].get(base) if recurrent else None
    parts = {field: parts[field] for field in fields or parts}
    shape, source, _ = next(iter(parts.values()))
    sizes, order = {field: shape[0] for field, (shape, *_) in parts.items()}, None
    if fields and is_tiled(config):
        order = row_order(sizes if fields != ("w_o",) else {"w_v": shape[1]}, cast(DeltaRuleSpec, config.recurrent))
    elif (base in GROUPED or len(parts) == 1) and source.rows is not None and not source.stacked:
        # In the engine, the part of a head that is rotated comes first.
        rows = [np.asarray(source.rows) for _, source, _ in parts.values()]
        order = np.argsort(np.argsort(np.concatenate(rows)))
    shape = stored_shape(config, base, (sum(sizes.values()), *shape[1:]), recurrent)

    def values() -> np.ndarray:
        whole, *others = [read() for *_, read in parts.values()]
        whole = np.concatenate([whole, *others]) if others else whole
        if order is not None:
            at: Any = (slice(None), order) if fields == ("w_o",) else order
            found = np.empty_like(whole)
            found[at] = whole
            whole = found
        if base == "attn_k_b.weight":
            whole = whole.reshape(shape[0], shape[2], shape[1]).swapaxes(1, 2)
        return whole.reshape(shape)

    return shape, values


def _values(config: ModelConfig, field: str, stored: list[Any], shape: tuple[int, ...], num_heads: int | None) -> Any:
    """Returns a weight with the numbers that GGUF has; num_heads as in `GGUFTensor`."""
    values = read_weight(stored, shape, np.float32)
    if num_heads:
        values = values.reshape(num_heads, 2, -1, *shape[1:]).swapaxes(1, 2).reshape(shape)
    if field == "log_decay":
        return -np.exp(values.astype(np.float64)).astype(np.float32)
    return values + np.float32(1) if adds_one(config, field) else values


# Architectures that are read and not written.
WITHOUT = (*OWN, *LAYER_NORMS, "minicpm3", "granitemoe")


def config_metadata(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """Returns the architecture and the keys of a config.

    Raises:
      ConfigError: GGUF has no name for its family here.
    """
    names = {family: name for name, family in ARCHITECTURES.items() if name not in WITHOUT}
    names |= {family: name for family, name in SHARED.items() if family != "olmo3"}
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
    keys |= dict.fromkeys(WIDTHS[:2], config.head_dim) | {WIDTHS[2]: rope.dims(config.head_dim)}
    if (experts := config.experts) is not None:
        keys |= {EXPERT_COUNT: experts.num_experts, EXPERTS_USED: experts.num_chosen}
        if names[config.family].startswith("qwen"):
            keys |= {EXPERT_WIDTH: config.d_ff, SHARED_WIDTH: experts.shared_d_ff}
    if rope.kind not in ("default", "factors", "none"):
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn" and rope.original_max_len:
        keys["rope.scaling.original_context_length"] = rope.original_max_len
        keys |= {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
    optional = {WINDOW: max(pattern.window or 0 for pattern in patterns)}
    optional |= dict(zip(SOFT_CAPS, (config.soft_cap, config.logit_soft_cap)))
    keys |= {key: value for key, value in optional.items() if value}
    keys |= keys_of(config)
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
