"""Matrices with adapters: each token may add the product of two small matrices of its own (LoRA, arXiv:2106.09685),
and give the rows of the sum other lengths (DoRA, arXiv:2402.09353).

The adapters of all slots are stacked, so that a change of slots compiles nothing. A product computes all slots at once
for all tokens, and each token keeps the product of its slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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


class Change(NamedTuple):
    """An adapter's change of a matrix W [out, in]: W x becomes (1 + gain) * (W x) + B A x, row by row."""

    a: np.ndarray  # [r, in]
    b: np.ndarray  # [out, r], with its scale and 1 + gain
    gain: np.ndarray | None = None  # float32 [out]; None for 0


# The changes of one adapter in one layer, by field of LayerParams.
LayerAdapter = Mapping[str, Change]


@flax.struct.dataclass
class Adapted(Matrix):
    """A matrix [out, in], or several of one input stacked, with S slots of adapters of rank R or less beside it.

    linear: multiplies by base. slots: int32 [...] of the tokens of a step, -1 for none; None outside a step, where
    products use base alone.
    """

    base: Any
    a: tuple[jax.Array, ...]  # [S, R, in] of each matrix stacked in base
    b: tuple[jax.Array, ...]  # [out, S, R] of each, out being its rows
    gains: tuple[jax.Array, ...]  # float32 [S, out] of each
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
            gain = jnp.concatenate(self.gains, axis=-1)[jnp.maximum(self.slots, 0)]
            added += gain * (of_base if b is None else of_base - b)
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
                if (weight := stated[name]) is not None and weight.packs and not weight.stacked and name not in apart
            }
        )
    return found


def adapter_bytes(config: ModelConfig, num_slots: int, rank: int, itemsize: int) -> int:
    """Returns the bytes of the slots on the device; itemsize: of a number of A and B."""
    return sum(
        num_slots * (rank * (rows + width) * itemsize + rows * 4)
        for layer in adaptable(config)
        for rows, width in layer.values()
    )


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
            gains = tuple(place(np.zeros((num_slots, rows), np.float32)) for rows, _ in sizes)
            changed[name] = Adapted(getattr(p, name), a, b, gains, linear)
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
        held[name], rank = (w.a, w.b, w.gains), w.a[0].shape[1]
        changes = [_padded(adapter.get(part), shapes[part], rank, w.a[0].dtype) for part in parts]
        new[name] = tuple(zip(*changes, strict=True))
    written = _write(held, new, np.int32(slot))
    changed = {
        name: dataclasses.replace(getattr(p, name), a=a, b=b, gains=gains) for name, (a, b, gains) in written.items()
    }
    return p.replace(**changed)  # pyright: ignore[reportAttributeAccessIssue]


def with_lengths(
    p: LayerParams,
    shapes: Mapping[str, tuple[int, int]],
    adapter: LayerAdapter,
    lengths: Mapping[str, np.ndarray],
    numbers: Callable[[Any], jax.Array],
) -> LayerAdapter:
    """Returns an adapter whose changes give the rows of the sum the lengths that it was trained with: m / |W + B A|
    times both, for each row of W (DoRA, section 3.1).

    Args:
      shapes: of the layer, from `adaptable`. lengths: m [out] of some of the adapter's matrices. numbers: returns a
        matrix in memory as float32 [out, in].
    """
    changed = dict(adapter)
    for name, parts in _parts(p, shapes):
        if not any(part in lengths for part in parts):
            continue
        start, base = 0, numbers(getattr(p, name).base)
        for part in parts:
            end = start + shapes[part][0]
            if part in lengths:
                a, b, _ = adapter[part]
                factor = lengths[part] / np.asarray(_row_lengths(base[start:end], a, b))
                changed[part] = Change(a, (b * factor[:, None]).astype(b.dtype), factor - 1)
            start = end
    return changed


@jax.jit
def _row_lengths(w: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    added = jnp.matmul(b.astype(jnp.float32), a.astype(jnp.float32), precision="highest")
    return jnp.linalg.norm(w + added, axis=1)


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


def _padded(change: Change | None, shape: tuple[int, int], rank: int, dtype) -> tuple[np.ndarray, ...]:
    a, b, gain = np.zeros((rank, shape[1]), dtype), np.zeros((shape[0], rank), dtype), np.zeros(shape[0], np.float32)
    if change is not None:
        a[: len(change.a)], b[:, : len(change.a)] = change.a, change.b
        if change.gain is not None:
            gain[:] = change.gain
    return a, b, gain


@jax.jit
def _write(held: Any, new: Any, slot: jax.Array) -> Any:
    # Steps under way still read the old arrays.
    return {
        name: (
            tuple(x.at[slot].set(y) for x, y in zip(held[name][0], a, strict=True)),
            tuple(x.at[:, slot].set(y) for x, y in zip(held[name][1], b, strict=True)),
            tuple(x.at[slot].set(y) for x, y in zip(held[name][2], gains, strict=True)),
        )
        for name, (a, b, gains) in new.items()
    }
