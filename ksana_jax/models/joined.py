"""Matrices that multiply the same input, stacked into one: fewer kernels, which a GPU wants in short steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.config import ModelConfig
from ksana_jax.layer_spec import LayerSpec
from ksana_jax.models.mlp import mlp_kind
from ksana_jax.models.packed_matrix import PackedMatrix
from ksana_jax.models.params import LayerParams, Params

# Fields of LayerParams by the one that holds all of them; biases have the same names with b_.
QKV, GATE_UP = ("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))


def joined(params: Params, config: ModelConfig, *, consume: bool = False) -> Params:
    """Stacks the query, key and value projections of each layer, and the gate and up projections of its MLP.

    Weights divided among devices stay so: each device stacks the rows that it has.

    Args:
      params: weights, or their shapes. Those that are stacked or packed already stay as they are.
      consume: deletes each array that has been stacked, so that memory need hold one layer's matrices twice.
    """
    layers = []
    for p, spec in zip(params.layers, config.layers, strict=True):
        for name, parts in (QKV, GATE_UP)[: 2 if mlp_kind(spec.mlp.kind).takes_joined else 1]:
            p = _with(p, name, parts, consume)
        layers.append(p)
    return params.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def separate(params: Params, config: ModelConfig) -> Params:
    """Returns weights as they were before `joined`; those that were not joined stay as they are."""
    layers = []
    for p, spec in zip(params.layers, config.layers, strict=True):
        layers.append(_without(_without(p, *QKV, spec), *GATE_UP, spec))
    return params.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def _with(p: LayerParams, name: str, parts: Sequence[str], consume: bool) -> LayerParams:
    matrices = [getattr(p, f"w_{part}") for part in parts]
    if any(w is None or isinstance(w, PackedMatrix) or len(w.shape) != 2 for w in matrices):
        return p
    changes: dict[str, Any] = {}
    for kind in ("w", "b"):
        found = [getattr(p, f"{kind}_{part}") for part in parts]
        whole = None if found[0] is None else jax.tree.map(lambda *xs: _stack(xs, consume), *found)
        changes |= {f"{kind}_{name}": whole} | {f"{kind}_{part}": None for part in parts}
    return p.replace(**changes)  # pyright: ignore[reportAttributeAccessIssue]


def _without(p: LayerParams, name: str, parts: Sequence[str], spec: LayerSpec) -> LayerParams:
    changes: dict[str, Any] = {}
    for kind in ("w", "b"):
        if (whole := getattr(p, f"{kind}_{name}")) is not None:
            changes[f"{kind}_{name}"] = None
            for part in parts:
                changes[f"{kind}_{part}"] = jax.tree.map(functools.partial(_piece, parts, part, spec), whole)
    return p.replace(**changes)  # pyright: ignore[reportAttributeAccessIssue]


def _rows(part: str, spec: LayerSpec, num_devices: int) -> int:
    """Returns how many rows of a matrix each device has. Of a kv head that several share, each has a copy."""
    a = spec.attention
    if part in GATE_UP[1]:
        return spec.mlp.d_ff // num_devices
    heads = a.num_heads // num_devices if part == "q" else max(a.num_kv_heads // num_devices, 1)
    return heads * a.head_dim


def _stack(xs: Sequence[Any], consume: bool) -> Any:
    """Stacks rows of arrays [out, ...], or shapes of arrays; of those that devices divide, each device's own."""
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


def _piece(parts: Sequence[str], part: str, spec: LayerSpec, x: jax.Array) -> jax.Array:
    """Returns one of the arrays of which `_stack` made x."""
    num = _num_devices(x)
    begin = sum(_rows(before, spec, num) for before in parts[: parts.index(part)])
    end = begin + _rows(part, spec, num)

    def piece(x: jax.Array) -> jax.Array:
        return x.reshape(num, -1, *x.shape[1:])[:, begin:end].reshape(-1, *x.shape[1:])

    return jax.jit(piece, out_shardings=x.sharding)(x)


def _num_devices(x: Any) -> int:
    """Returns among how many devices the rows of an array are divided."""
    return 1 if x.sharding is None else x.shape[0] // x.sharding.shard_shape(x.shape)[0]
