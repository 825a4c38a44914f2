"""Specifications of recurrent layers, which have a state of fixed size instead of keys and values. Knows no arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

from ksana_jax.core import checks


@dataclasses.dataclass(frozen=True)
class ShortConvSpec:
    """Specifies gated short convolutions (LFM2, arXiv:2511.23404).

    b, c and x are products of the layer's input; each channel of b * x is convolved over the last `kernel` tokens, and
    c times the result goes to the output projection. The state is the last kernel - 1 values of b * x.

    layers: of the model, counted from 0, that are convolutions; the others have attention.
    bias: whether the projections and the convolution have one.
    """

    layers: tuple[int, ...]
    kernel: int = 3
    bias: bool = False

    def state(self, d_model: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
        """Returns the arrays of a layer's state: shape, and NumPy's name of the type, None for the model's."""
        return {"conv": ((self.kernel - 1, d_model), None)}

    def own_problems(self) -> list[str | None]:
        """Returns the problems of the numbers of this kind."""
        return [checks.integer("kernel of recurrent layers", self.kernel, 2)]


RecurrentSpec = ShortConvSpec


def problems(config: Any) -> list[str]:
    """Returns the problems of the recurrent layers of a `ModelConfig`, one sentence each."""
    spec, num_layers = config.recurrent, config.num_layers
    if spec is None:
        return []
    used = [name for name in ("kv_layers", "latent", "alibi") if getattr(config, name) is not None]
    found, layers = [*filter(None, spec.own_problems())], spec.layers
    if list(layers) != sorted(set(layers)) or any(checks.integer("layer", layer, 0) for layer in layers):
        return [*found, f"recurrent layers are {layers!r:.60}, must be layers from 0 in rising order"]
    if not layers or layers[-1] >= num_layers:
        found.append(f"recurrent layers are {layers!r:.60}, must be some of layers 0 to {num_layers - 1}")
    if len(layers) >= num_layers:
        found.append("all layers are recurrent; supported: models with at least one layer of attention")
    return found + [f"recurrent layers do not go with {name}" for name in used]


def of_layers(spec: RecurrentSpec | None, num_layers: int) -> list[RecurrentSpec | None]:
    """Returns the specification of each layer of a model; None where it attends."""
    return [spec if spec is not None and layer in spec.layers else None for layer in range(num_layers)]


def first_layers(spec: RecurrentSpec | None, num_layers: int) -> RecurrentSpec | None:
    """Returns the recurrent layers of a model truncated to its first layers; None if none are left."""
    if spec is None or not (left := tuple(layer for layer in spec.layers if layer < num_layers)):
        return None
    return dataclasses.replace(spec, layers=left)
