"""Presets of attention patterns, and the forms in which users can give a pattern. Plain numbers; no jax, no blocks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import FULL, AttentionPattern, per_layer
from ksana_jax.core.plugins import nearest
from ksana_jax.methods.full_heads import ChosenHeads, read_full_heads

# The field of a pattern that names kv heads.
FULL_HEADS = "full_heads"

# Fields of AttentionPattern, with the numbers of the papers; a window should not exceed the model's training context.
PRESETS: dict[str, dict[str, Any]] = {
    "full": {},
    # Mistral 7B, arXiv:2310.06825, section 2; the idea is Longformer's, arXiv:2004.05150.
    "sliding_window": {"window": 4096},
    # StreamingLLM, arXiv:2309.17453, table 1: 4 sinks and 1,020 recent tokens.
    "streaming_llm": {"window": 1020, "num_sinks": 4, "sink_position": "cache"},
    # LM-Infinite, arXiv:2308.16137: the trained context of Llama 2, and the fewest starting tokens of its "10 to 100".
    "lm_infinite": {"window": 4096, "num_sinks": 10, "sink_position": "ceiling"},
    # DuoAttention, arXiv:2410.10819: its streaming heads; `full_heads` names the retrieval heads.
    "duo_attention": {"window": 256, "num_sinks": 64, "sink_position": "absolute"},
}

# A preset's name, or fields of AttentionPattern, optionally with a "preset" that they override, and with "full_heads",
# kv heads that keep the model's own pattern, see `methods.full_heads`; or {"0-9": pattern, "12": pattern} by layers.
PatternLike: TypeAlias = AttentionPattern | str | Mapping[str, Any]

_RANGE = re.compile(r"\d+(-\d+)?")
_FORMS = "an AttentionPattern, a dict of its fields, the name of a preset, or a list with one of these for each layer"


def read_pattern(given: PatternLike) -> AttentionPattern:
    """Returns the attention pattern given in one of its forms.

    Args:
      given: "streaming_llm", {"preset": "streaming_llm", "window": 112}, {"window": 112}, or an AttentionPattern.

    Raises:
      ConfigError: the preset or field is unknown (the nearest is named), or `given` has another type.
      ValueError: a number is out of range.
    """
    if isinstance(given, AttentionPattern):
        return given
    if isinstance(given, str):
        given = {"preset": given}
    if not isinstance(given, Mapping):
        raise ConfigError(f"pattern is of type {type(given).__name__}, must be {_FORMS}")
    names = [f.name for f in dataclasses.fields(AttentionPattern)]
    for name in given:
        if name not in (*names, "preset"):
            close = nearest(str(name), names, cutoff=0.0)
            if name == FULL_HEADS:
                raise ConfigError("pattern.full_heads names heads of all layers: one of a list of patterns has none")
            raise ConfigError(f"pattern has no field {name!r}; the nearest is {close!r}")
    preset = "full" if given.get("preset") is None else given["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        close = nearest(str(preset), PRESETS, cutoff=0.0)
        raise ConfigError(f"there is no attention pattern {preset!r}; the nearest of {', '.join(PRESETS)} is {close!r}")
    return AttentionPattern(**PRESETS[preset] | {k: v for k, v in given.items() if k != "preset"})


def read_patterns(
    given: PatternLike | Sequence[PatternLike] | None, model: ModelConfig
) -> tuple[AttentionPattern, ...]:
    """Returns one attention pattern per layer, from one for all layers or a list; see `read_pattern`.

    Where the kv heads of a layer have different patterns, by `full_heads` or a list that has one for each head, layer
    by layer, there is one for each kv head of each layer.

    Args:
      given: None takes the model's own; so do layers that none of several ranges names.

    Raises:
      ConfigError: as `read_pattern`, or a range is none of the model's layers, or has layers of another one.
      ValueError: the list has another number of entries, or a number is out of range.
    """
    own, heads = per_layer(model.pattern, model.num_layers), model.num_kv_heads
    if given is None:
        return own
    if names_layers(given):
        found = _of_layers(given, own)
    elif names_heads(given):
        pattern = read_pattern({name: value for name, value in given.items() if name != FULL_HEADS})
        full = read_full_heads(given[FULL_HEADS], model.num_layers, heads)
        # Layers with windows of their own keep them.
        found = [
            own[layer] if head in kept or own[layer] != FULL else pattern
            for layer, kept in enumerate(full)
            for head in range(heads)
        ]
    else:
        found = [read_pattern(p) for p in given] if isinstance(given, (list, tuple)) else read_pattern(given)  # pyright: ignore[reportArgumentType]  it refuses other types
    patterns = per_layer(found, model.num_layers, heads)
    if len(patterns) > model.num_layers and all(p == patterns[i - i % heads] for i, p in enumerate(patterns)):
        return patterns[::heads]
    return patterns


def names_heads(given: object) -> TypeGuard[Mapping[str, Any]]:
    """True if a pattern holds for some kv heads only, see `methods.full_heads`."""
    return isinstance(given, Mapping) and given.get(FULL_HEADS) is not None


def names_layers(given: object) -> TypeGuard[Mapping[Any, PatternLike]]:
    """True if a pattern is a mapping of layers, "3" or "0-9", to their patterns."""
    return isinstance(given, Mapping) and bool(given) and all(_RANGE.fullmatch(str(key)) for key in given)


def _of_layers(given: Mapping[Any, PatternLike], own: Sequence[AttentionPattern]) -> list[AttentionPattern]:
    found, last = dict(enumerate(own)), len(own) - 1
    named: set[int] = set()
    for key, pattern in given.items():
        first, _, end = str(key).partition("-")
        layers = range(int(first), int(end or first) + 1)
        if not layers or layers[-1] > last or not named.isdisjoint(layers):
            raise ConfigError(f"pattern has the layers {key!r}, must be some of 0 to {last}, once each")
        named.update(layers)
        found |= dict.fromkeys(layers, read_pattern(pattern))
    return list(found.values())


def plain_pattern(given: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Returns all fields of a pattern that `names_heads`, also of how it names them."""
    fields, heads = {name: value for name, value in given.items() if name != FULL_HEADS}, given[FULL_HEADS]
    full = read_full_heads(heads, model.num_layers, model.num_kv_heads)
    if isinstance(heads, Mapping):
        full = dataclasses.asdict(ChosenHeads(**heads))
    return dataclasses.asdict(read_pattern(fields)) | {FULL_HEADS: full}
