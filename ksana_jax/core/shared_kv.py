"""Layers that attend to the keys and values of an earlier layer, and store none. Knows layers and patterns; no arrays.

Source: Cross-Layer Attention, arXiv:2405.12981; YOCO, arXiv:2405.05254, whose upper half reads one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ksana_jax.core import checks, refusals


def shared_by(factor: int, num_layers: int) -> tuple[int, ...] | None:
    """Returns `ModelConfig.kv_layers` of layers of which each `factor` in a row share the keys and values of the first
    (CLA2 for 2); None for 1."""
    return None if factor == 1 else tuple(layer - layer % factor for layer in range(num_layers))


def own(kv_layers: Sequence[int] | None, num_layers: int) -> list[bool]:
    """Returns which layers have keys and values of their own."""
    return [layer == source for layer, source in enumerate(kv_layers or range(num_layers))]


def problems(kv_layers: Any, num_layers: int, rope: Any) -> list[str]:
    """Returns the problems of `ModelConfig.kv_layers`, one sentence each. rope: of all layers, or a tuple."""
    if not isinstance(kv_layers, tuple) or len(kv_layers) != num_layers:
        return [f"kv_layers is {kv_layers!r:.60}, must name a layer for each of {num_layers} layers"]
    found = []
    for layer, source in enumerate(kv_layers):
        if problem := checks.integer(f"kv_layers[{layer}]", source, 0, layer):
            return [problem]
        if kv_layers[source] != source:
            found.append(f"kv_layers: layer {layer} reads layer {source}, which stores no keys and values")
        elif isinstance(rope, tuple) and rope[layer] != rope[source]:
            found.append(f"kv_layers: layer {layer} has another rope than layer {source}, whose keys it reads rotated")
    return found


def sources(kv_layers: Sequence[int] | None, num_layers: int, num_places: int) -> tuple[int, ...]:
    """Returns for each place the one whose keys and values it reads, most often its own.

    num_places: of them, one for each layer, or for each kv head of each layer.
    """
    each = num_places // num_layers
    return tuple(layer * each + head for layer in kv_layers or range(num_layers) for head in range(each))


def check_patterns(sources: Sequence[int], patterns: Sequence[Any]) -> None:
    """Checks that places see the same tokens as the place that they read; its blocks hold no others.

    Raises:
      ConfigError: one does not.
    """
    for place, source in enumerate(sources):
        if patterns[place] != patterns[source]:
            named = f"{refusals.OTHER_PATTERN} ({patterns[place]} at {place}, {patterns[source]} at {source})"
            refusals.check({refusals.SHARED_KV: True, refusals.OTHER_PATTERN: named})
