"""Paged attention in a model's forward: rotates, writes this step's keys and values to their blocks, attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ksana_jax.core.layer_spec import LayerSpec
from ksana_jax.core.patterns import PatternArrays
from ksana_jax.devices.features import ALL_FEATURES, Features
from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.models.latents import Indexed
from ksana_jax.models.rope import Rope, grown
from ksana_jax.models.transformer import Attend
from ksana_jax.ops.context import AttentionContext
from ksana_jax.ops.expanded import Expand, attend_expanded
from ksana_jax.ops.implementations import PagedAttention
from ksana_jax.ops.indexing import write_index
from ksana_jax.ops.observation import AttentionObserver
from ksana_jax.ops.pool import KVCache
from ksana_jax.ops.row_state import entered, scored
from ksana_jax.ops.selection import attend_selected, summarise
from ksana_jax.scheduler.step.types import StepArrays, StepShape


class PagedLayer(NamedTuple):
    """One layer of a step, as paged attention sees it.

    angles: of its rope at the step's text positions.
    pattern: its numbers, int32 scalars: traced, so that changing a window does not compile again.
    sink_logits, alibi: [N] of its heads, see `AttentionContext`; or None.
    observer: None where nothing is evicted. selection: None where queries read all blocks.
    at: index in the group of the keys that it reads, see `kv.layout.KVLayout.places`. batch: the step's arrays of the
      group, on the device.
    residual: the same of exact keys and of exact values next to codes, or None; see `KVLayout.residual_places`.
    schedule: layers with the same number, pattern and group share what the implementation schedules.
    expand: `latents.expansion` of its weights in a step whose queries attend to expanded latents; else None.
    """

    spec: LayerSpec
    rope: Rope
    angles: tuple[jax.Array, jax.Array]
    pattern: PatternArrays
    sink_logits: jax.Array | None
    alibi: jax.Array | None
    observer: AttentionObserver | None
    at: Any
    batch: StepArrays
    residual: Any
    schedule: int
    selection: SelectionMethod | None = None
    expand: Expand | None = None


def paged_attend(
    layers: Sequence[PagedLayer],
    shape: StepShape,
    num_repositioned_sinks: int,
    attention: PagedAttention,
    features: Features = ALL_FEATURES,
) -> Attend:
    """Returns an `Attend` for some layers, whose state is the KVCache.

    Args:
      num_repositioned_sinks: maximum sinks at "cache" or "ceiling" positions.
      features: operations that programs may use on the device.
    """
    schedules: dict[int, Any] = {}

    def attend(index: int, q, k, v, cache: KVCache, indexed: Indexed | None = None):
        layer = layers[index]
        spec, at, turns = layer.spec.attention, layer.at, layer.angles
        q = grown(q, layer.batch.positions, spec.query_growth)
        context = AttentionContext(
            at,
            layer.batch,
            shape,
            layer.pattern,
            layer.rope,
            num_repositioned_sinks,
            spec.soft_cap,
            layer.sink_logits,
            layer.observer,
            layer.residual,
            features,
            layer.alibi,
            indexed and indexed.rotated(layer.rope, turns, spec),
        )
        if (observer := context.observer) is not None:
            cache = entered(cache, q, context, spec.scale) if spec.own_kv else cache
            if observer.unrotated_keys:
                turns = context.rope.angles(context.batch.cache_positions)
        if attention.schedule and layer.schedule not in schedules:
            with jax.named_scope("attention"):
                schedules[layer.schedule] = attention.schedule(context, cache, spec.num_heads)
        with jax.named_scope("kv_write"):
            queries, cache = attention.write(q, k, v, cache, context, turns, spec.scale)
            if layer.selection is not None and spec.own_kv:
                by_token = layer.selection.by_token
                cache = write_index(cache, context) if by_token else summarise(layer.selection, cache, context)
        with jax.named_scope("attention"):
            if layer.expand is not None:
                out, masses = attend_expanded(layer.expand, attention, queries, cache, context, spec), ()
            elif layer.selection is None:
                out, masses = attention.attend(queries, cache, context, schedules.get(layer.schedule))
            else:
                out, masses = attend_selected(layer.selection, attention, queries, cache, context)
        return out.astype(q.dtype), scored(cache, context, masses) if masses else cache

    return attend
