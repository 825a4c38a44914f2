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
from ksana_jax.native.adapters import RANK
from ksana_jax.native.shapes import PANEL


class AdapterWeights(NamedTuple):
    """An adapter's change of a matrix W [out, in]: W x becomes (1 + gain) * (W x) + B A x, row by row."""

    a: np.ndarray  # [r, in]
    b: np.ndarray  # [out, r], with its scale and 1 + gain
    gain: np.ndarray | None = None  # float32 [out]; None for 0


# The changes of one adapter in one layer, by field of LayerParams.
LayerAdapter = Mapping[str, AdapterWeights]


@flax.struct.dataclass
class Adapted(Matrix):
    """A matrix [out, in], or several of one input stacked, with S slots of adapters of rank R or less next to it.

    linear: multiplies by base. rank: R. slots: int32 [...] of the tokens of a step, -1 for none; None outside a step,
    where products use base alone.
    """

    base: Any
    a: tuple[jax.Array, ...]  # [S, R, in] of each matrix stacked in base
    b: tuple[jax.Array, ...]  # [out, S, R] of each, out being its rows
    gains: tuple[jax.Array, ...]  # float32 [S, out] of each
    linear: Linear = flax.struct.field(pytree_node=False)
    rank: int = flax.struct.field(pytree_node=False)
    slots: jax.Array | None = None
    stacks = False

    @staticmethod
    def in_slot(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns matrices [R, in] and [out, R] as the arrays hold them: a slot's part of each."""
        return a, b

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


def adapter_bytes(config: ModelConfig, num_slots: int, rank: int, itemsize: int, packs: bool = False) -> int:
    """Returns the bytes of the slots on the device.

    Args:
      itemsize: of a number of A and B. packs: whether the weights are packed, and A and B then filled up.
    """
    of_rank, of_rows = (RANK, PANEL) if packs else (1, 1)
    rank += -rank % of_rank
    return sum(
        num_slots * (rank * (rows + -rows % of_rows + width) * itemsize + rows * 4)
        for layer in adaptable(config)
        for rows, width in layer.values()
    )


def with_slots(
    params: Params,
    config: ModelConfig,
    num_slots: int,
    rank: int,
    linear: Linear,
    place: Callable[[Any], Any],
    form: Callable[[Any], type[Adapted]] = lambda base: Adapted,
) -> Params:
    """Returns weights with empty slots next to each matrix that adapters may change.

    Args:
      params: in the form that products read. linear: these products. place: puts arrays on the device.
      form: of a matrix with adapters, given the matrix.
    """
    dtype, layers = params.final_norm.dtype, []
    for p, shapes in zip(params.layers, adaptable(config), strict=True):
        changed: dict[str, Any] = {}
        for name, parts in _parts(p, shapes):
            base, of_slot = getattr(p, name), []
            made = form(base)
            for part in parts:
                low, high, gain = _padded(None, shapes[part], rank, dtype)
                of_slot.append((*made.in_slot(low, high), gain))
            a, b, gains = (
                tuple(place(np.stack([x] * num_slots, axis)) for x in of_parts)
                for axis, of_parts in zip((0, 1, 0), zip(*of_slot, strict=True), strict=True)
            )
            changed[name] = made(base, a, b, gains, linear, rank)
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
        held[name], changes = (w.a, w.b, w.gains), []
        for part in parts:
            a, b, gain = _padded(adapter.get(part), shapes[part], w.rank, w.a[0].dtype)
            changes.append((*w.in_slot(a, b), gain))
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
                changed[part] = AdapterWeights(a, (b * factor[:, None]).astype(b.dtype), factor - 1)
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


def _padded(change: AdapterWeights | None, shape: tuple[int, int], rank: int, dtype) -> tuple[np.ndarray, ...]:
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
