"""Matrices that multiply the same input, stacked into one: fewer kernels, which a GPU wants in short steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import LayerSpec
from ksana_jax.models.matrix import Matrix
from ksana_jax.models.mlp import mlp_kind
from ksana_jax.models.params import LayerParams, Params, heads_of, param_shapes, stated, weight_fields


def joined(params: Params, config: ModelConfig, *, consume: bool = False) -> Params:
    """Stacks the query, key and value projections of each layer, and the gate and up projections of its MLP.

    Weights divided among devices stay so: each device stacks the rows that it has.

    Args:
      params: weights, or their shapes. Weights that are stacked or packed already stay as they are.
      consume: deletes each array that has been stacked, so that memory need hold one layer's matrices twice.
    """
    layers = []
    for p, spec in zip(params.layers, config.layers, strict=True):
        mlp = mlp_kind(spec.mlp.kind)
        apart = set() if mlp.takes_joined else set(mlp.shapes(config.d_model, spec.mlp))
        for name, parts in stacks().items():
            if not apart.intersection(f"w_{part}" for part in parts):
                p = _with(p, name, parts, consume)
        layers.append(p)
    return params.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def separate(params: Params, config: ModelConfig) -> Params:
    """Undoes `joined`; weights that were not joined stay as they are."""
    layers = []
    for p, shapes, spec in zip(params.layers, param_shapes(config).layers, config.layers, strict=True):
        for name, parts in stacks().items():
            p = _without(p, name, parts, shapes, spec)
        layers.append(p)
    return params.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def stacks() -> dict[str, tuple[str, ...]]:
    """Returns the stacked parts of each joined field: {"qkv": ("q", "k", "v"), ...}, field names without w_ or b_."""
    found: dict[str, tuple[str, ...]] = {}
    for name, weight in weight_fields().items():
        if weight is not None and weight.joins is not None:
            whole = weight.joins.removeprefix("w_")
            found[whole] = (*found.get(whole, ()), name.removeprefix("w_"))
    return found


def _with(p: LayerParams, name: str, parts: Sequence[str], consume: bool) -> LayerParams:
    matrices, biases = ([getattr(p, f"{kind}_{part}") for part in parts] for kind in ("w", "b"))
    if any(w is None or len(w.shape) != 2 or (isinstance(w, Matrix) and not w.stacks) for w in matrices):
        return p
    if len({jax.tree.structure(w) for w in matrices}) > 1:
        return p  # of different forms
    if len({b is None for b in biases}) > 1:
        return p  # nothing would read the bias of one part
    changes: dict[str, Any] = {}
    for kind, found in (("w", matrices), ("b", biases)):
        whole = None if found[0] is None else jax.tree.map(lambda *xs: _stack(xs, consume), *found)
        changes |= {f"{kind}_{name}": whole} | {f"{kind}_{part}": None for part in parts}
    return p.replace(**changes)  # pyright: ignore[reportAttributeAccessIssue]


def _without(p: LayerParams, name: str, parts: Sequence[str], shapes: LayerParams, spec: LayerSpec) -> LayerParams:
    changes: dict[str, Any] = {}
    for kind in ("w", "b"):
        if (whole := getattr(p, f"{kind}_{name}")) is not None:
            num = _num_devices(jax.tree.leaves(whole)[0])
            rows = [_local_rows(f"w_{part}", shapes, num, spec) for part in parts]
            changes[f"{kind}_{name}"] = None
            for i, part in enumerate(parts):
                piece = functools.partial(_piece, num, sum(rows[:i]), rows[i])
                changes[f"{kind}_{part}"] = jax.tree.map(piece, whole)
    return p.replace(**changes)  # pyright: ignore[reportAttributeAccessIssue]


def _local_rows(name: str, shapes: LayerParams, num_devices: int, spec: LayerSpec) -> int:
    return stated(name, "separation").local_rows(getattr(shapes, name)[0], num_devices, heads_of(name, spec))


def _stack(xs: Sequence[Any], consume: bool) -> Any:
    """Stacks rows of arrays [out, ...], or shapes of arrays; each device's own rows if devices divide them."""
    sharding, num = xs[0].sharding, _num_devices(xs[0])

    def stack(*xs: jax.Array) -> jax.Array:
        divided = [x.reshape(num, -1, *x.shape[1:]) for x in xs]
        return jnp.concatenate(divided, axis=1).reshape(-1, *xs[0].shape[1:])

    if isinstance(xs[0], jax.ShapeDtypeStruct):
        whole = jax.eval_shape(stack, *xs)
        return jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=sharding)
    whole = jax.block_until_ready(jax.jit(stack, out_shardings=sharding)(*xs))
    if consume:
        for x in xs:
            x.delete()
    return whole


def _piece(num_devices: int, begin: int, rows: int, x: jax.Array) -> jax.Array:
    """Returns one of the arrays that `_stack` joined in x; begin is its first row in each device's part."""

    def piece(x: jax.Array) -> jax.Array:
        divided = x.reshape(num_devices, -1, *x.shape[1:])
        return divided[:, begin : begin + rows].reshape(-1, *x.shape[1:])

    return jax.jit(piece, out_shardings=x.sharding)(x)


def _num_devices(x: Any) -> int:
    """Returns the number of devices that divide the rows of an array."""
    return 1 if x.sharding is None else x.shape[0] // x.sharding.shard_shape(x.shape)[0]
