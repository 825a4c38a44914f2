"""Matrices with adapters: each token may add the product of two small matrices of its own (LoRA, arXiv:2106.09685).

The adapters of all slots are stacked, so that a change of slots compiles nothing. A product computes all slots at once
for all tokens, and each token keeps the product of its slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.joined import stacks
from ksana_jax.models.layers import Linear
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.mlp import mlp_kind
from ksana_jax.models.params import LayerParams, Params, param_shapes, weight_fields, weights_of

# The matrices of one adapter in one layer, by field of LayerParams: A [r, in], and B [out, r] with its scale.
LayerAdapter = Mapping[str, tuple[np.ndarray, np.ndarray]]


@flax.struct.dataclass
class Adapted(Matrix):
    """A matrix [out, in], or several of one input stacked, with S slots of adapters of rank R or less beside it.

    linear: multiplies by base. slots: int32 [...] of the tokens of a step, -1 for none; None outside a step, where
    products use base alone.
    """

    base: Any
    a: tuple[jax.Array, ...]  # [S, R, in] of each matrix stacked in base
    b: tuple[jax.Array, ...]  # [out, S, R] of each, out being its rows
    linear: Linear = flax.struct.field(pytree_node=False)
    slots: jax.Array | None = None
    stacks = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def multiply(self, x: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
        if self.slots is None:
            return self.linear(x, self.base, b, dtype=dtype)
        of_base, has_adapter = self.linear(x, self.base, b, dtype=jnp.float32), (self.slots >= 0)[..., None]
        with jax.named_scope("adapters"):
            added = jnp.concatenate([self._added(x, *pair) for pair in zip(self.a, self.b, strict=True)], axis=-1)
            # Rows without an adapter keep their bits: a sum would make 0 of -0.
            return jnp.where(has_adapter, of_base + added, of_base).astype(dtype or x.dtype)

    def _added(self, x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        num_slots, rank, width = a.shape
        low = self.linear(x, a.reshape(-1, width), dtype=jnp.float32).reshape(*x.shape[:-1], num_slots, rank)
        is_own = self.slots[..., None] == jnp.arange(num_slots)  # pyright: ignore[reportOptionalSubscript]
        own = jnp.where(is_own[..., None], low, 0).reshape(*x.shape[:-1], -1)
        return self.linear(own.astype(x.dtype), b.reshape(len(b), -1), dtype=jnp.float32)


def adaptable(config: ModelConfig) -> list[dict[str, tuple[int, int]]]:
    """Returns for each layer the matrices that adapters may change, those read through `linear` alone: {field of
    LayerParams: (out, in)}."""
    stated, found = weight_fields(), []
    for shapes, spec in zip(param_shapes(config).layers, config.layers, strict=True):
        mlp = mlp_kind(spec.mlp.kind)
        apart = () if mlp.quantises else mlp.shapes(config.d_model, spec.mlp)
        found.append(
            {
                name: shape
                for name, shape in weights_of(shapes).items()
                if (weight := stated[name]) is not None and weight.packs and name not in apart
            }
        )
    return found


def adapter_bytes(config: ModelConfig, num_slots: int, rank: int, itemsize: int) -> int:
    """Returns the bytes of the slots on the device; itemsize: of a number."""
    return sum(num_slots * rank * sum(shape) * itemsize for layer in adaptable(config) for shape in layer.values())


def with_slots(
    params: Params, config: ModelConfig, num_slots: int, rank: int, linear: Linear, place: Callable[[Any], Any]
) -> Params:
    """Returns weights with empty slots beside each matrix that adapters may change.

    Args:
      params: in the form that products read. linear: these products. place: puts arrays on the device.
    """
    dtype, layers = params.final_norm.dtype, []
    for p, shapes in zip(params.layers, adaptable(config), strict=True):
        changed: dict[str, Any] = {}
        for name, parts in _parts(p, shapes):
            sizes = [shapes[part] for part in parts]
            a = tuple(place(np.zeros((num_slots, rank, width), dtype)) for _, width in sizes)
            b = tuple(place(np.zeros((rows, num_slots, rank), dtype)) for rows, _ in sizes)
            changed[name] = Adapted(getattr(p, name), a, b, linear)
        layers.append(p.replace(**changed))  # pyright: ignore[reportAttributeAccessIssue]
    return params.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def write_slot(p: LayerParams, shapes: Mapping[str, tuple[int, int]], slot: int, adapter: LayerAdapter) -> LayerParams:
    """Returns the weights of a layer with an adapter in a slot; matrices that it leaves alone get zeros.

    Args:
      shapes: of the layer, from `adaptable`. adapter: of at most the rank of the slots.
    """
    held, new = {}, {}
    for name, parts in _parts(p, shapes):
        w = getattr(p, name)
        held[name], rank = (w.a, w.b), w.a[0].shape[1]
        pairs = [_padded(adapter.get(part), shapes[part], rank, w.a[0].dtype) for part in parts]
        new[name] = tuple(zip(*pairs, strict=True))
    written = _write(held, new, np.int32(slot))
    changed = {name: dataclasses.replace(getattr(p, name), a=a, b=b) for name, (a, b) in written.items()}
    return p.replace(**changed)  # pyright: ignore[reportAttributeAccessIssue]


def bound(p: LayerParams, slots: jax.Array) -> LayerParams:
    """Returns a layer's weights for a step whose tokens have these slots."""
    adapted = {name: w for name, w in weights_of(p).items() if isinstance(w, Adapted)}
    changed = {name: dataclasses.replace(w, slots=slots) for name, w in adapted.items()}
    return p.replace(**changed)  # pyright: ignore[reportAttributeAccessIssue]


def _parts(p: LayerParams, shapes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields fields of a layer that has or gets adapters, each with the fields of the matrices stacked in it."""
    stacked = {f"w_{name}": tuple(f"w_{part}" for part in parts) for name, parts in stacks().items()}
    for name in weights_of(p):
        parts = stacked.get(name, (name,))
        if all(part in shapes for part in parts):
            yield name, parts


def _padded(
    pair: tuple[np.ndarray, np.ndarray] | None, shape: tuple[int, int], rank: int, dtype
) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.zeros((rank, shape[1]), dtype), np.zeros((shape[0], rank), dtype)
    if pair is not None:
        a[: len(pair[0])], b[:, : len(pair[0])] = pair
    return a, b


@jax.jit
def _write(held: Any, new: Any, slot: jax.Array) -> Any:
    # Steps under way still read the old arrays.
    return {
        name: (
            tuple(x.at[slot].set(y) for x, y in zip(held[name][0], a, strict=True)),
            tuple(x.at[:, slot].set(y) for x, y in zip(held[name][1], b, strict=True)),
        )
        for name, (a, b) in new.items()
    }
