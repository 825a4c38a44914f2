"""Parameters of a model: shapes derived from the layer specs, counts, and random initialisation. No forward."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from ksana_jax.config import ModelConfig
from ksana_jax.layer_spec import AttentionSpec
from ksana_jax.models.int8_matrix import quantise
from ksana_jax.models.layers import norm_kind
from ksana_jax.models.mlp import mlp_kind

# Number of random weights drawn at a time. Drawing needs six times the memory of its result, besides the result, and is
# faster if that fits the processor's cache (250M weights on two cores: 3.9 s; 6.9 s with sixteen times as many).
DRAWN_AT_ONCE = 2**16


@flax.struct.dataclass
class LayerParams:
    """Weights of one layer. A field is None if the family has no such weight.

    Matrices are [out, in], and may each be an Int8Matrix. An engine may keep those with the same input as one, in
    fields that no family has: see `models.joined`.
    """

    attn_norm: jax.Array  # [D]
    w_q: jax.Array  # [N*H, D]
    w_k: jax.Array  # [K*H, D]
    w_v: jax.Array  # [K*H, D]
    w_o: jax.Array  # [D, N*H]
    mlp_norm: jax.Array  # [D]
    w_gate: jax.Array  # [F, D]
    w_up: jax.Array  # [F, D]
    w_down: jax.Array  # [D, F]
    b_q: jax.Array | None = None  # [N*H]
    b_k: jax.Array | None = None  # [K*H]
    b_v: jax.Array | None = None  # [K*H]
    b_o: jax.Array | None = None  # [D]
    b_gate: jax.Array | None = None  # [F]
    b_up: jax.Array | None = None  # [F]
    b_down: jax.Array | None = None  # [D]
    q_norm: jax.Array | None = None  # [H]
    k_norm: jax.Array | None = None  # [H]
    sink_logits: jax.Array | None = None  # [N]; see `sink_logits`
    post_attn_norm: jax.Array | None = None  # [D]
    post_mlp_norm: jax.Array | None = None  # [D]
    w_qkv: jax.Array | None = None  # [(N + 2*K)*H, D], instead of w_q, w_k and w_v
    b_qkv: jax.Array | None = None  # [(N + 2*K)*H]
    w_gate_up: jax.Array | None = None  # [2*F, D], instead of w_gate and w_up
    b_gate_up: jax.Array | None = None  # [2*F]


@flax.struct.dataclass
class Params:
    """Weights of a model. head is None if it is tied to the embedding.

    embed is a NumPy array if it is kept on the host; compiled programs must then not use it.
    """

    embed: jax.Array  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [D]
    head: jax.Array | None = None  # [V, D]


def attention_shapes(d_model: int, spec: AttentionSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's query, key, value and output projections, by field of LayerParams."""
    h, d = spec.head_dim, d_model
    n, k = spec.num_heads * h, spec.num_kv_heads * h
    shapes = {"w_q": (n, d), "w_k": (k, d), "w_v": (k, d), "w_o": (d, n)}
    if spec.qkv_bias:
        shapes |= {"b_q": (n,), "b_k": (k,), "b_v": (k,)}
    if spec.out_bias:
        shapes |= {"b_o": (d,)}
    if spec.qk_norm:
        shapes |= {"q_norm": (h,), "k_norm": (h,)}
    if spec.sinks == "learned":
        shapes |= {"sink_logits": (spec.num_heads,)}
    return shapes


def sink_logits(params: LayerParams, spec: AttentionSpec) -> jax.Array | None:
    """Returns the logits [N] that a layer's softmax has besides its scores, learned or 0, or None if it has none."""
    return jnp.zeros(spec.num_heads, jnp.float32) if spec.sinks == "zero" else params.sink_logits


def param_shapes(config: ModelConfig) -> Params:
    """Returns the shape of every weight, as a Params whose leaves are tuples of int.

    Raises:
      ConfigError: a layer has an unknown kind of MLP or norm.
    """
    d, vocab = config.d_model, config.vocab_size
    norm_kind(config.norm)
    layers: list[Any] = []
    for layer in config.layers:
        shapes = attention_shapes(d, layer.attention) | mlp_kind(layer.mlp.kind).shapes(d, layer.mlp)
        names = ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm")[: 4 if layer.norms.sandwich else 2]
        layers.append(LayerParams(**dict.fromkeys(names, (d,)), **shapes))  # pyright: ignore[reportArgumentType]
    head: Any = None if config.tie_embeddings else (vocab, d)
    return Params((vocab, d), tuple(layers), (d,), head)  # pyright: ignore[reportArgumentType]


def num_params(config: ModelConfig) -> int:
    """Counts the model's parameters; tied embeddings count once."""
    return sum(map(math.prod, jax.tree.leaves(param_shapes(config), is_leaf=is_shape)))


def is_shape(x: Any) -> bool:
    """Whether x is a leaf of `param_shapes`, for jax.tree.map's is_leaf."""
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def quantised(params: Params, quantization: str | None) -> Params:
    """Returns the weights with all matrices of layers quantised; embedding, output head, norms and biases stay.

    Args:
      params: their matrices may be quantised or packed already, and then stay as they are.
      quantization: None, "int8" or "w8a8", as in `EngineConfig`.
    """
    if quantization is None:
        return params
    code = functools.partial(quantise, rounds_inputs=quantization == "w8a8")
    layers = []
    for layer in params.layers:
        names = [field.name for field in dataclasses.fields(layer) if field.name.startswith("w_")]
        matrices = {name: getattr(layer, name) for name in names}
        found: dict[str, Any] = {name: code(w) if hasattr(w, "dtype") else w for name, w in matrices.items()}
        layers.append(layer.replace(**found))  # pyright: ignore[reportAttributeAccessIssue]
    return params.replace(layers=tuple(layers))  # pyright: ignore[reportAttributeAccessIssue]


def init_params(
    config: ModelConfig,
    seed: int = 0,
    dtype=jnp.float32,
    std: float = 0.02,
    place: Callable[[Any, jax.Array], jax.Array] = lambda path, leaf: leaf,
) -> Params:
    """Draws random weights: normal matrices with deviation `std`, identity norms, zero biases and sink logits.

    Projections back into the residual stream are scaled down by sqrt(2 L) (GPT-2's initialisation). Weights are drawn
    one after the other, in place and in pieces, so that peak memory is little more than the weights.

    Args:
      place: called with each weight's path, from `jax.tree_util`, and the weight; returns it on its devices.
    """
    key = jax.random.key(seed)
    paths, tree = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    leaves, index = [], 0
    for path, shape in paths:
        name = path[-1].name
        index += name != "sink_logits"  # so that models that differ only in them start from the same matrices
        if "norm" in name:
            leaf = jnp.full(shape, norm_kind(config.norm).identity, dtype)
        elif name.startswith("b_") or name == "sink_logits":
            leaf = jnp.zeros(shape, dtype)
        else:
            scale = std / (2 * config.num_layers) ** 0.5 if name in ("w_o", "w_down") else std
            leaf = _draw(jax.random.fold_in(key, index - 1), scale, shape=shape, dtype=dtype)
        leaves.append(jax.block_until_ready(place(path, leaf)))
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: jax.Array, scale: float, *, shape: tuple[int, int], dtype) -> jax.Array:
    """Draws normal numbers with standard deviation `scale`."""
    num_rows = max(DRAWN_AT_ONCE // math.prod(shape[1:]), 1)
    if num_rows >= shape[0]:
        return (jax.random.normal(key, shape) * scale).astype(dtype)

    def piece(index, out):
        rows = (jax.random.normal(jax.random.fold_in(key, index), (num_rows, *shape[1:])) * scale).astype(dtype)
        # The last piece overlaps the one before if the rows are not a multiple of its size.
        return jax.lax.dynamic_update_slice_in_dim(out, rows, jnp.minimum(index * num_rows, shape[0] - num_rows), 0)

    return jax.lax.fori_loop(0, -(-shape[0] // num_rows), piece, jnp.zeros(shape, dtype))
