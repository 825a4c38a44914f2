"""Attention of layers whose kv heads have places of their own in the pool, because their patterns differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ksana_jax.models.transformer import Attend
from ksana_jax.ops.paged import PagedLayer, paged_attend


def attend_by_head(num_kv_heads: int, layers: Sequence[PagedLayer], *settings: Any) -> Attend:
    """Returns an `Attend` that computes each kv head of a layer, with its query heads, as a layer of its own.

    Args:
      layers: num_kv_heads for each layer, in order, with the sink logits and slopes of all of its heads.
      settings: of `paged_attend` after the layers.
    """
    each = [_of_head(layer, index % num_kv_heads, num_kv_heads) for index, layer in enumerate(layers)]
    attend = paged_attend(each, *settings)

    def by_head(index: int, q, k, v, cache):
        nothing = [None] * num_kv_heads
        found, heads = [], (nothing if x is None else jnp.split(x, num_kv_heads, axis=-2) for x in (q, k, v))
        for head, (q_head, k_head, v_head) in enumerate(zip(*heads, strict=True)):
            out, cache = attend(index * num_kv_heads + head, q_head, k_head, v_head, cache)
            found.append(out)
        return jnp.concatenate(found, axis=-2), cache

    return by_head


def _of_head(layer: PagedLayer, head: int, num_kv_heads: int) -> PagedLayer:
    spec = layer.spec.attention
    spec = dataclasses.replace(spec, num_heads=spec.num_heads // num_kv_heads, num_kv_heads=1)
    sinks, slopes = (None if x is None else x.reshape(num_kv_heads, -1)[head] for x in (layer.sink_logits, layer.alibi))
    return layer._replace(spec=dataclasses.replace(layer.spec, attention=spec), sink_logits=sinks, alibi=slopes)
