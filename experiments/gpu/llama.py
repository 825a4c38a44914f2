"""A model of Llama-8B's shape with random weights, made quickly on the device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.params import Params, is_shape, param_shapes
from ksana_jax.ops.pool import KVCache

LLAMA_8B = ModelConfig(
    vocab_size=128_256,
    d_model=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    d_ff=14_336,
    rope=RopeConfig(theta=500_000.0),
    max_position=8192,
)
SMALL = ModelConfig(
    vocab_size=256, d_model=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, d_ff=128, max_position=8192
)


def random_params(config: ModelConfig, seed: int = 0, dtype=jnp.bfloat16) -> Params:
    """Normal weights of deviation 0.02, norms one; each matrix drawn at once, which needs a few GB more."""
    paths, tree = jax.tree.flatten_with_path(param_shapes(config), is_leaf=is_shape)
    leaves = []
    for index, (path, shape) in enumerate(paths):
        if "norm" in path[-1].name:
            leaves.append(jnp.ones(shape, dtype))
        else:
            leaves.append(_normal(jax.random.fold_in(jax.random.key(seed), index), shape, dtype))
    return jax.block_until_ready(jax.tree.unflatten(tree, leaves))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, shape, dtype):
    return (jax.random.normal(key, shape, dtype) * 0.02).astype(dtype)


def weight_bytes(params: Params) -> int:
    """Bytes that a step reads of the weights: all but the rows of the embedding that it does not look up."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return total - (0 if params.head is None else params.embed.nbytes)


@functools.partial(jax.jit, donate_argnums=0)
def _filled(blocks, key):
    piece = min(16, blocks.shape[0])
    values = jax.random.normal(key, (piece, *blocks.shape[1:]), jnp.bfloat16)
    if blocks.dtype == jnp.uint16:
        values = jax.lax.bitcast_convert_type(values, jnp.uint16)

    def fill(i, blocks):
        at = jnp.minimum(i * piece, blocks.shape[0] - piece)
        return jax.lax.dynamic_update_slice_in_dim(blocks, values.astype(blocks.dtype), at, 0)

    return jax.lax.fori_loop(0, -(-blocks.shape[0] // piece), fill, blocks)


def filled(cache: KVCache) -> KVCache:
    """The pool with normal numbers in it (the same every 16 blocks): zeros would be timed too fast."""
    return cache.with_kv(_filled(cache.kv, jax.random.key(1)))


XLA = {"attention": "xla", "linear": "xla", "norm": "xla"}


def operators(context, case: str) -> dict[str, str]:
    """Settings of an engine's operators: XLA's for all once a kernel has broken a case, as any may be the one."""
    from ksana_jax.ops.implementations import IMPLEMENTATIONS

    return XLA if any(context.excluded(i.name, case) for i in IMPLEMENTATIONS) else {}
