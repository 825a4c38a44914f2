"""Attention of one row to keys and values of each head, which are expanded from its latents one layer at a time.

A query takes fewer products than with latents, a key more: see `LatentSpec.least_expanded`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ksana_jax.core.layer_spec import AttentionSpec
from ksana_jax.core.patterns import FAR
from ksana_jax.models.latents import expanded_queries
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.implementations import PagedAttention
from ksana_jax.ops.kv_write import Queries
from ksana_jax.ops.pool import EXACT_CODECS, KVCache

# See `models.latents.expansion`.
Expand = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
# Tokens that are expanded together.
PIECE_TOKENS = 512


def attend_expanded(
    expand: Expand,
    attention: PagedAttention,
    queries: Queries,
    cache: KVCache,
    context: AttentionContext,
    spec: AttentionSpec,
) -> jax.Array:
    """Attends the tokens of one row, in tiles, to its expanded keys and values: [T, N, value].

    The row's block table leads to a pool of one layer, which has the row's blocks in order.

    Args:
      queries: of `latents.project`. cache: of latents; this step's tokens are in it.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.2, equations 9 to 11, without absorbing UK and UV.
    """
    assert spec.latent is not None
    q, batch = expanded_queries(queries.q, spec.latent), context.batch
    size, width = cache.block_size, batch.block_tables.shape[1]
    count = max(min(PIECE_TOKENS // size, width), 1)  # blocks of a piece
    table = jnp.pad(batch.block_tables[0], (0, -width % count))
    kind = q.dtype

    def expanded(i: jax.Array, kv: jax.Array) -> jax.Array:
        stored, _ = cache.read(context.layer, jax.lax.dynamic_slice_in_dim(table, i * count, count))
        # One after the other: XLA on CPUs takes two and a half times as long to write a stack of both.
        for side, vectors in enumerate(expand(stored[0].astype(kind))):  # [count * B, N, expanded_dim]
            by_head = vectors.reshape(count, 1, 1, size, *vectors.shape[1:]).swapaxes(3, 4)
            bits = jax.lax.bitcast_convert_type(by_head, kv.dtype)
            kv = jax.lax.dynamic_update_slice(kv, bits, (i * count, 0, side, 0, 0, 0))
        return kv

    # Bits: XLA on CPUs would convert all of kv to float32 and back for each piece of bfloat16.
    kv = jnp.zeros((len(table), 1, 2, q.shape[1], size, q.shape[2]), f"uint{8 * kind.itemsize}")
    used = jnp.max(jnp.where(batch.block_starts[0] < FAR, 1 + jnp.arange(width), 0))
    kv = context.features.loop(-(-used // count), len(table) // count, expanded, kv)
    own = batch._replace(block_tables=jnp.broadcast_to(jnp.arange(width, dtype=table.dtype), batch.block_tables.shape))
    alone = context._replace(layer=0, batch=own)
    pool = KVCache({"kv": jax.lax.bitcast_convert_type(kv, kind)}, EXACT_CODECS[kind.name])
    work = None if attention.schedule is None else attention.schedule(alone, pool, spec.num_heads)
    out, _ = attention.attend(Queries(q, None), pool, alone, work)
    return out[..., : spec.latent.value]
