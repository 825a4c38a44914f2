"""Presets of attention patterns, and the forms in which users can give a pattern. Plain numbers; no jax, no blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import AttentionPattern, per_layer
from ksana_jax.core.plugins import nearest

# Fields of AttentionPattern, with the numbers of the papers; a window should not exceed the model's training context.
PRESETS: dict[str, dict[str, Any]] = {
    "full": {},
    # Mistral 7B, arXiv:2310.06825, section 2; the idea is Longformer's, arXiv:2004.05150.
    "sliding_window": {"window": 4096},
    # StreamingLLM, arXiv:2309.17453, table 1: 4 sinks and 1,020 recent tokens.
    "streaming_llm": {"window": 1020, "num_sinks": 4, "sink_position": "cache"},
    # LM-Infinite, arXiv:2308.16137: the trained context of Llama 2, and the fewest starting tokens of its "10 to 100".
    "lm_infinite": {"window": 4096, "num_sinks": 10, "sink_position": "ceiling"},
}

# A preset's name, or fields of AttentionPattern, optionally with a "preset" that they override.
PatternLike: TypeAlias = AttentionPattern | str | Mapping[str, Any]

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
            raise ConfigError(f"pattern has no field {name!r}; the nearest is {close!r}")
    preset = "full" if given.get("preset") is None else given["preset"]
    if not isinstance(preset, str) or preset not in PRESETS:
        close = nearest(str(preset), PRESETS, cutoff=0.0)
        raise ConfigError(f"there is no attention pattern {preset!r}; the nearest of {', '.join(PRESETS)} is {close!r}")
    return AttentionPattern(**PRESETS[preset] | {k: v for k, v in given.items() if k != "preset"})


def read_patterns(given: PatternLike | Sequence[PatternLike], num_layers: int) -> tuple[AttentionPattern, ...]:
    """Returns one attention pattern per layer, from one for all layers or a list; see `read_pattern`.

    Raises:
      ConfigError: as `read_pattern`.
      ValueError: the list does not have num_layers entries, or a number is out of range.
    """
    if isinstance(given, (list, tuple)):
        return per_layer([read_pattern(p) for p in given], num_layers)
    return per_layer(read_pattern(given), num_layers)  # pyright: ignore[reportArgumentType]  it refuses other types
