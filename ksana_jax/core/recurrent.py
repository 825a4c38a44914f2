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
    width: channels, of one of several devices; None for d_model.
    """

    layers: tuple[int, ...]
    kernel: int = 3
    bias: bool = False
    width: int | None = dataclasses.field(default=None, repr=False)

    def convolved(self, d_model: int) -> tuple[tuple[int, int], ...]:
        """Returns the convolved numbers of a token, part after part: heads, and channels of each. Devices divide the
        heads of each part."""
        return ((self.width or d_model, 1),)

    def state(self, d_model: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
        """Returns the arrays of a layer's state: shape, and NumPy's name of the type, None for the model's. The second
        axis is that of channels or heads."""
        return {"conv": ((self.kernel - 1, self.width or d_model), None)}

    def inputs(self, d_model: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
        """Returns the numbers of a token that its state is computed from, as `state` does."""
        return {"conv": ((self.width or d_model,), None)}

    def divided(self, d_model: int, num_devices: int) -> ShortConvSpec:
        """Returns the layers that each of several devices computes."""
        return dataclasses.replace(self, width=d_model // num_devices)

    def undivided(self, d_model: int, num_devices: int) -> list[str]:
        """Returns why devices cannot divide the layers."""
        return [f"d_model {d_model} is not a multiple of it"] if d_model % num_devices else []

    def own_problems(self) -> list[str | None]:
        """Returns the problems of the numbers of this kind."""
        return [checks.integer("kernel of recurrent layers", self.kernel, 2)]


@dataclasses.dataclass(frozen=True)
class DeltaRuleSpec:
    """Specifies gated delta rules (Gated DeltaNet, arXiv:2412.06464, equation 10; Kimi Delta Attention,
    arXiv:2510.26692, equation 1).

    Queries, keys and values are convolved over the last `kernel` tokens, and queries and keys divided by their norms.
    A head's state S [key_dim, value_dim], in float32, becomes S' = e^g S, then S' + k (beta (v - S'^T k))^T, of which
    q / sqrt(key_dim) reads S^T q. The result is normalised and multiplied by a gate.

    layers: of the model, counted from 0, that are delta rules; the others have attention.
    num_key_heads: of queries and of keys; each serves as many of num_value_heads that follow each other.
    beta_factor: of beta, a sigmoid: 2 allows negative eigenvalues. eps: of the norm of results.
    norm_placement: of these layers, see `layer_spec.NormSpec`; None for the model's.
    rank: of the products that g and the gate come from, with a decay for each channel of keys, g [key_dim], and a
      sigmoid of the gate (Kimi Delta Attention); None for a decay for each head and a SiLU.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    beta_factor: float = 1.0
    eps: float = 1e-5
    norm_placement: Any = None
    rank: int | None = None

    @property
    def num_channels(self) -> int:
        """Numbers of a token that are convolved: its queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def convolved(self, d_model: int) -> tuple[tuple[int, int], ...]:
        """See `ShortConvSpec.convolved`."""
        keys = self.num_key_heads, self.key_dim
        return keys, keys, (self.num_value_heads, self.value_dim)

    def state(self, d_model: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
        """See `ShortConvSpec.state`."""
        matrix = 1, self.num_value_heads, self.key_dim, self.value_dim
        return {"conv": ((self.kernel - 1, self.num_channels), None), "matrix": (matrix, "float32")}

    def inputs(self, d_model: int) -> dict[str, tuple[tuple[int, ...], str | None]]:
        """See `ShortConvSpec.inputs`."""
        heads = self.num_value_heads
        found = {"conv": ((self.num_channels,), None), "decay": ((heads,), "float32")}
        if not isinstance(self, DeltaRuleSpec):
            return found
        decay = found["decay"] if self.rank is None else ((heads * self.key_dim,), "float32")
        return found | {"decay": decay, "beta": found["decay"]}

    def divided(self, d_model: int, num_devices: int) -> Any:
        """See `ShortConvSpec.divided`. Several devices may have one head of keys, with heads of values of their own."""
        keys, values = max(self.num_key_heads // num_devices, 1), self.num_value_heads // num_devices
        return dataclasses.replace(self, num_key_heads=keys, num_value_heads=values)

    def undivided(self, d_model: int, num_devices: int) -> list[str]:
        """See `ShortConvSpec.undivided`."""
        keys, values, found = self.num_key_heads, self.num_value_heads, []
        if values % num_devices:
            found.append(f"num_value_heads {values} of recurrent layers is not a multiple of it")
        if keys % num_devices and num_devices % keys:
            found.append(f"num_key_heads {keys} of recurrent layers is neither a multiple of it nor a divisor")
        return found

    def own_problems(self) -> list[str | None]:
        """Returns the problems of the numbers of this kind."""
        sizes = ("num_key_heads", "num_value_heads", "key_dim", "value_dim")
        found = [checks.integer(f"{name} of recurrent layers", getattr(self, name)) for name in sizes]
        found.append(checks.integer("kernel of recurrent layers", self.kernel, 2))
        found.append(checks.integer("rank of recurrent layers", getattr(self, "rank", None), optional=True))
        if not any(found) and (more := self.num_value_heads % self.num_key_heads):
            found.append(f"num_value_heads {self.num_value_heads} is {more} more than a multiple of num_key_heads")
        return found


@dataclasses.dataclass(frozen=True)
class Mamba2Spec:
    """Specifies selective state spaces of Mamba-2 (arXiv:2405.21060, section 7).

    A head's state S [key_dim, value_dim], in float32, becomes e^g S + k (dt v)^T, of which q reads S^T q; g = -a dt,
    and dt is a softplus. v is added to the result, times a number of the head. The paper names q, k and v C, B and x.
    The result is multiplied by a gate, and each of num_key_heads equal parts of it normalised.

    layers: of the model, counted from 0, that are such; the others have attention.
    num_key_heads: of q and of k; each serves as many of num_value_heads that follow each other.
    bias: whether the convolution of q, k and v over the last `kernel` tokens has one. eps: of the norm.
    norm_divided: True on each of several devices that have a part of the numbers that are normalised together.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    bias: bool = True
    eps: float = 1e-5
    norm_divided: bool = dataclasses.field(default=False, repr=False)

    num_channels = DeltaRuleSpec.num_channels
    convolved = DeltaRuleSpec.convolved
    state = DeltaRuleSpec.state
    inputs = DeltaRuleSpec.inputs
    own_problems = DeltaRuleSpec.own_problems

    def divided(self, d_model: int, num_devices: int) -> Mamba2Spec:
        """See `ShortConvSpec.divided`."""
        found = DeltaRuleSpec.divided(self, d_model, num_devices)  # pyright: ignore[reportArgumentType]
        return dataclasses.replace(found, norm_divided=self.num_key_heads < num_devices)

    def undivided(self, d_model: int, num_devices: int) -> list[str]:
        """See `ShortConvSpec.undivided`."""
        if 1 < (keys := self.num_key_heads) and keys % num_devices:
            return [f"num_key_heads {keys} of Mamba-2, parts that are normalised, is neither 1 nor a multiple of it"]
        return DeltaRuleSpec.undivided(self, d_model, num_devices)  # pyright: ignore[reportArgumentType]


RecurrentSpec = ShortConvSpec | DeltaRuleSpec | Mamba2Spec


def problems(config: Any) -> list[str]:
    """Returns the problems of the recurrent layers of a `ModelConfig`, one sentence each."""
    spec, num_layers = config.recurrent, config.num_layers
    if spec is None:
        return []
    used = [name for name in ("kv_layers", "alibi") if getattr(config, name) is not None]
    found, layers = [*filter(None, spec.own_problems())], spec.layers
    if list(layers) != sorted(set(layers)) or any(checks.integer("layer", layer, 0) for layer in layers):
        return [*found, f"recurrent layers are {layers!r:.60}, must be layers from 0 in rising order"]
    if not layers or layers[-1] >= num_layers:
        found.append(f"recurrent layers are {layers!r:.60}, must be some of layers 0 to {num_layers - 1}")
    if len(layers) >= num_layers:
        found.append("all layers are recurrent; supported: models with at least one layer of attention")
    return found + [f"recurrent layers do not go with {name}" for name in used]


def of_layers(spec: RecurrentSpec | None, norms: Any, num_layers: int) -> list[tuple[RecurrentSpec | None, Any]]:
    """Returns the specification of each layer of a model, None where it attends, and its `NormSpec`; norms: of those
    that attend."""
    own = getattr(spec, "norm_placement", None)
    of_own = norms if own is None else dataclasses.replace(norms, placement=own)
    is_own = [spec is not None and layer in spec.layers for layer in range(num_layers)]
    return [(spec, of_own) if found else (None, norms) for found in is_own]


def first_layers(spec: RecurrentSpec | None, num_layers: int) -> RecurrentSpec | None:
    """Returns the recurrent layers of a model truncated to its first layers; None if none are left."""
    if spec is None or not (left := tuple(layer for layer in spec.layers if layer < num_layers)):
        return None
    return dataclasses.replace(spec, layers=left)
