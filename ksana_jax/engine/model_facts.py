"""Facts in a model's files that decide its answers, each with its file, for `ksana doctor MODEL`."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import gguf_of, read_gguf
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.core.patterns import per_layer
from ksana_jax.core.sources import model_path
from ksana_jax.loading.config_json import listed, load_config, read_generation, read_json
from ksana_jax.loading.find import find_weights
from ksana_jax.loading.load import auto_dtype
from ksana_jax.loading.quantised.tensor import QuantisedTensor
from ksana_jax.tokenizers import Tokenizer, find_tokenizer, render_chat
from ksana_jax.tokenizers.files import one_line
from ksana_jax.tokenizers.gguf_endings import INFILL_ENDS

MAX_NAMED = 8
_GGUF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id", *INFILL_ENDS)


class Fact(NamedTuple):
    """One line of the report; source: the file or the default it comes from."""

    name: str
    value: str
    source: str


def model_facts(model: str | os.PathLike[str]) -> list[Fact]:
    """Returns the facts that decide a model's answers, given its path or name; reads no weights.

    Raises:
      LoadError, ConfigError, TokenizerError: as loading the model would.
    """
    path = model_path(model, weights=False)
    config, tokenizer = load_config(path), find_tokenizer(path)
    source = (gguf_of(path) or path / "config.json").name
    table = "" if config.position_offset is None else ", the length of a table of positions"
    facts = [
        Fact("model", f"{config.family}, {config.num_layers} layers, embedding of {config.vocab_size:,} rows", source),
        Fact("context", f"{config.max_position:,} tokens{table}", source),
    ]
    ends = ending_files(path, config, tokenizer)
    facts += [Fact("ends a text", _token(i, config, tokenizer), ", ".join(files)) for i, files in ends.items()]
    if not ends:
        facts.append(Fact("ends a text", "nothing: answers continue to max_tokens", "no file"))
    if tokenizer is None:
        facts.append(Fact("tokenizer", "none: prompts are token ids", "no file"))
    else:
        facts += [*_of_tokenizer(config, tokenizer), _template(path, tokenizer)]
    facts += [
        Fact("rope", value, source) for value in _by_layer([spec.attention.rope for spec in config.layers], _rope)
    ]
    patterns = per_layer(config.pattern, config.num_layers)
    facts += [Fact("attention", value, source) for value in _by_layer(patterns, str)]
    if config.kv_layers is not None:
        shared = [f"layer {n} reads layer {of}" for n, of in enumerate(config.kv_layers) if n != of]
        facts.append(Fact("shared keys and values", ", ".join(shared) or "none", source))
    if (experts := config.experts) is not None:
        extra = " and a shared MLP" if experts.shared_d_ff else ""
        if experts.plain_layers:
            extra += f"; none in layers {', '.join(map(str, experts.plain_layers))}"
        facts.append(Fact("experts", f"{experts.num_chosen} of {experts.num_experts} for each token{extra}", source))
    if scores := _scores(config):
        facts.append(Fact("scores", ", ".join(scores), source))
    return facts + _dtypes(path, config)


def _scores(config: ModelConfig) -> list[str]:
    """Returns how scores differ from q k / sqrt(head_dim) and plain logits; empty for most models."""
    said = []
    if config.attention_scale is not None and config.attention_scale != config.head_dim**-0.5:
        said.append(f"attention scale {config.attention_scale:.6g} instead of {config.head_dim**-0.5:.6g}")
    caps = {"attention": config.soft_cap, "logits": config.logit_soft_cap}
    said += [f"soft cap {cap:g} of {name}" for name, cap in caps.items() if cap is not None]
    scales = {"residuals": config.residual_scale, "logits": config.logit_scale}
    said += [f"scale {scale:.6g} of {name}" for name, scale in scales.items() if scale != 1]
    if config.alibi is not None:
        said.append(f"ALiBi with slopes from {max(config.alibi):.4g} to {min(config.alibi):.4g} of heads")
    return said + ["trained attention sinks"] * (config.sinks is not None)


def ending_files(path: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> dict[int, list[str]]:
    """Returns ids that end a text, each with the files that name it, in the order of `ending_ids`."""
    found: dict[int, list[str]] = collections.defaultdict(list)
    if (gguf := gguf_of(path)) is not None:
        metadata = read_gguf(gguf).metadata
        for name in _GGUF_ENDS:
            if metadata.get(key := f"tokenizer.ggml.{name}") in config.eos_ids:
                found[metadata[key]].append(f"{gguf.name}: {key}")
    else:
        generation = path / "generation_config.json"
        files = ((generation, read_generation(generation)), (path / "config.json", read_json(path / "config.json")))
        for file, values in files:
            for index in listed(values.get("eos_token_id")):
                found[index].append(file.name)
    for index in config.eos_ids:
        found[index] = found[index] or [f"{gguf.name}: its text" if gguf else f"default of {config.family}"]
    if tokenizer is not None and tokenizer.eos_id is not None and gguf is None:
        found[tokenizer.eos_id].append(Path(tokenizer.eos_source).name)
    return {index: files for index, files in found.items() if index != -1}


def _token(index: int, config: ModelConfig, tokenizer: Tokenizer | None) -> str:
    text = "" if tokenizer is None else f" {tokenizer.piece(index).data.decode(errors='replace')!r}"
    return f"{index}{text}" + ("" if index < config.vocab_size else ", which the embedding has no row for: never drawn")


def _of_tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> list[Fact]:
    source, size = Path(tokenizer.source).name, tokenizer.vocab_size
    lacks = size - config.vocab_size
    beyond = f"; prompts with one of the last {lacks:,} are refused, the embedding has no row for them"
    begins = " ".join(_token(index, config, tokenizer) for index in tokenizer.encode(""))
    added = tokenizer.added_ids
    names = [_token(index, config, tokenizer) for index in added[:MAX_NAMED]]
    names += [f"and {len(added) - MAX_NAMED:,} more"] * (len(added) > MAX_NAMED)
    return [
        Fact("tokenizer", f"{size:,} ids{beyond if lacks > 0 else ''}", source),
        Fact("added to a prompt", begins or "nothing", source),
        Fact("added tokens", f"{len(added):,}: {', '.join(names)}" if names else "none", source),
    ]


def _template(path: Path, tokenizer: Tokenizer) -> Fact:
    names = (Path(tokenizer.source).name,) if gguf_of(path) else ("chat_template.jinja", "tokenizer_config.json")
    source = next((name for name in names[:-1] if (path / name).exists()), names[-1])
    if tokenizer.chat_template is None:
        return Fact("chat template", tokenizer.no_template or "none: no chats", source)
    said = f"{len(tokenizer.chat_template):,} characters"
    try:
        shown = one_line(repr(render_chat(tokenizer, [{"role": "user", "content": "hi"}])))
        return Fact("chat template", f"{said}; a first message 'hi' becomes {shown}", source)
    except ValueError as error:
        return Fact("chat template", f"{said}; of a first message: {error}", source)


def _rope(rope: RopeConfig) -> str:
    if rope.kind == "none":
        return "none"
    plain = {field.name: field.default for field in dataclasses.fields(rope)}
    values = {name: getattr(rope, name) for name in plain if name not in ("kind", "theta")}
    others = [f"{name} {value}" for name, value in values.items() if value != plain[name]]
    scaled = ["of max_model_len in all texts, if that is more"] * (rope.kind == "dynamic")
    scaled += ["short_factors only if max_model_len is no more"] * (rope.kind == "longrope")
    return ", ".join([rope.kind, f"theta {rope.theta:,.10g}", *others, *scaled])


def _by_layer(values: Sequence[Any], shown: Callable[[Any], str]) -> list[str]:
    """Returns each distinct value with its layers, which go unsaid where all have the same."""
    layers: dict[Any, list[int]] = collections.defaultdict(list)
    for index, value in enumerate(values):
        layers[value].append(index)
    if len(layers) == 1:
        return [shown(values[0])]
    return [f"{shown(value)} in layers {', '.join(map(str, which))}" for value, which in layers.items()]


def _dtypes(path: Path, config: ModelConfig) -> list[Fact]:
    auto, default = auto_dtype(path), EngineConfig.dtype
    return [
        Fact("weights in files", _stored(path, config), "headers of the weights"),
        Fact("weights in memory", f"{default}; with dtype: auto {auto}, on this device", "default of dtype"),
        Fact("keys and values", "in the dtype of the weights in memory", "default of kv_cache_dtype"),
    ]


def _stored(path: Path, config: ModelConfig) -> str:
    try:
        tensors = find_weights(path, config).values()
    except LoadError as error:
        return str(error)
    counts = collections.Counter(tensor.dtype for tensor in tensors)
    said = "tensors: " + ", ".join(f"{count:,} in {dtype}" for dtype, count in counts.most_common())
    formats = dict.fromkeys(str(tensor.format) for tensor in tensors if isinstance(tensor, QuantisedTensor))
    return "; ".join([said, *formats])
