"""One decoder-only forward for every family: Llama, Mistral, Qwen2, Qwen3 and what resembles them.

It knows tokens, not positions: attention, with its rope and its mask, is the caller's function `attend`. The engine's
writes to the paged cache and reads from it, training's is dense, and `examples/attention_by_hand.ipynb` writes one.
Layers are unrolled: a scan over layers was 17 times slower on CPU and copies slices of the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from ksana_jax.config import ModelConfig
from ksana_jax.models.layers import linear, rms_norm, swiglu

# attend(layer, q [..., N, H], k [..., K, H], v [..., K, H], state) -> (out [..., N, H], state).
# layer is a Python int, q and k are not yet rotated, and state is whatever travels from layer to layer.
Attend = Callable[[int, jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

# Random weights drawn at a time. Drawing needs six times as much memory besides its result, and is faster where that
# fits into the processor's cache (250M weights on two cores: 3.9 s; 6.9 s with sixteen times as many).
DRAWN_AT_ONCE = 2**16


@flax.struct.dataclass
class LayerParams:
    """Weights of one layer; matrices [out, in]. None where the family has no such weight."""

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


@flax.struct.dataclass
class Params:
    """Weights of a model. head is None where the embedding is tied.

    embed is a NumPy array where it is kept on the host; no compiled program may use it then.
    """

    embed: jax.Array  # [V, D]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [D]
    head: jax.Array | None = None  # [V, D]


def param_shapes(config: ModelConfig) -> Params:
    """Shape of every weight: a Params whose leaves are tuples of int."""
    d, f, h = config.d_model, config.d_ff, config.head_dim
    n, k = config.num_heads * h, config.num_kv_heads * h
    layer: dict[str, Any] = {
        "attn_norm": (d,), "w_q": (n, d), "w_k": (k, d), "w_v": (k, d), "w_o": (d, n),
        "mlp_norm": (d,), "w_gate": (f, d), "w_up": (f, d), "w_down": (d, f),
    }  # fmt: skip
    if config.qkv_bias:
        layer |= {"b_q": (n,), "b_k": (k,), "b_v": (k,)}
    if config.out_bias:
        layer |= {"b_o": (d,)}
    if config.mlp_bias:
        layer |= {"b_gate": (f,), "b_up": (f,), "b_down": (d,)}
    if config.qk_norm:
        layer |= {"q_norm": (h,), "k_norm": (h,)}
    whole: dict[str, Any] = {"embed": (config.vocab_size, d), "final_norm": (d,)}
    if not config.tie_embeddings:
        whole["head"] = (config.vocab_size, d)
    return Params(layers=(LayerParams(**layer),) * config.num_layers, **whole)


def is_shape(x: Any) -> bool:
    """Whether a leaf of `param_shapes` is meant, for jax.tree.map's is_leaf."""
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def init_params(config: ModelConfig, seed: int = 0, dtype=jnp.float32, std: float = 0.02) -> Params:
    """Random weights: matrices normal with the given deviation, norms one, biases zero.

    Projections back into the residual stream are scaled down by sqrt(2 L) (GPT-2's initialisation). One weight is drawn
    after the other, in place and piece by piece, so that the peak is the weights and little more.
    """
    key = jax.random.key(seed)
    paths, tree = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    leaves = []
    for index, (path, shape) in enumerate(paths):
        name = path[-1].name
        if "norm" in name:
            leaf = jnp.ones(shape, dtype)
        elif name.startswith("b_"):
            leaf = jnp.zeros(shape, dtype)
        else:
            scale = std / (2 * config.num_layers) ** 0.5 if name in ("w_o", "w_down") else std
            leaf = _draw(jax.random.fold_in(key, index), scale, shape=shape, dtype=dtype)
        leaves.append(jax.block_until_ready(leaf))
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key: jax.Array, scale: float, *, shape: tuple[int, int], dtype) -> jax.Array:
    """Normal numbers of deviation `scale`."""
    num_rows = max(DRAWN_AT_ONCE // math.prod(shape[1:]), 1)
    if num_rows >= shape[0]:
        return (jax.random.normal(key, shape) * scale).astype(dtype)

    def piece(index, out):
        rows = (jax.random.normal(jax.random.fold_in(key, index), (num_rows, *shape[1:])) * scale).astype(dtype)
        # The last piece overlaps the one before where they do not divide the rows.
        return jax.lax.dynamic_update_slice_in_dim(out, rows, jnp.minimum(index * num_rows, shape[0] - num_rows), 0)

    return jax.lax.fori_loop(0, -(-shape[0] // num_rows), piece, jnp.zeros(shape, dtype))


def forward(params: Params, tokens: jax.Array, attend: Attend, state: Any, *, config: ModelConfig):
    """Runs the network up to the final norm.

    Args:
      tokens: [...] ids in [0, V), or [..., D] rows of the embedding that were looked up elsewhere.
      attend: attention of one layer; see `Attend`. It decides about rope, mask and softmax.
      state: pytree that attend receives in the first layer and hands on to the next, such as the KV cache.

    Returns:
      Hidden states [..., D], and the state after the last layer.
    """
    x = params.embed[tokens] if jnp.issubdtype(tokens.dtype, jnp.integer) else tokens
    lead = x.shape[:-1]
    heads = (*lead, config.num_heads, config.head_dim)
    kv_heads = (*lead, config.num_kv_heads, config.head_dim)
    for index, p in enumerate(params.layers):
        with jax.named_scope(f"layer{index}"):
            y = rms_norm(x, p.attn_norm, config.norm_eps)
            q = linear(y, p.w_q, p.b_q).reshape(heads)
            k = linear(y, p.w_k, p.b_k).reshape(kv_heads)
            v = linear(y, p.w_v, p.b_v).reshape(kv_heads)
            if p.q_norm is not None and p.k_norm is not None:
                q, k = rms_norm(q, p.q_norm, config.norm_eps), rms_norm(k, p.k_norm, config.norm_eps)
            out, state = attend(index, q, k, v, state)
            x = x + linear(out.reshape(*lead, -1), p.w_o, p.b_o)
            y = rms_norm(x, p.mlp_norm, config.norm_eps)
            x = x + swiglu(y, p.w_gate, p.w_up, p.w_down, p.b_gate, p.b_up, p.b_down)
    return rms_norm(x, params.final_norm, config.norm_eps), state


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Scores [..., V] in float32 of hidden states [..., D]."""
    head = params.embed if params.head is None else params.head
    return jax.lax.dot_general(hidden, head, (((hidden.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
