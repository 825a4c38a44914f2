"""Paged attention in a model's forward: rotates, writes this step's keys and values to their blocks, attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ksana_jax.core.layer_spec import LayerSpec
from ksana_jax.core.patterns import PatternArrays
from ksana_jax.devices.features import ALL_FEATURES, Features
from ksana_jax.models.rope import Rope
from ksana_jax.models.transformer import Attend
from ksana_jax.ops.attention import AttentionContext
from ksana_jax.ops.implementations import Implementation
from ksana_jax.ops.observation import Observer
from ksana_jax.ops.pool import KVCache
from ksana_jax.scheduler.step.types import StepArrays, StepShape


def paged_attend(
    batches: Sequence[StepArrays],
    shape: StepShape,
    patterns: PatternArrays,
    *,
    layers: Sequence[LayerSpec],
    ropes: Sequence[Rope],
    angles: Sequence[tuple[jax.Array, jax.Array]],
    num_repositioned_sinks: int,
    implementation: Implementation,
    alike: Sequence[int],
    sink_logits: Sequence[jax.Array | None],
    places: Sequence[tuple[int, int]],
    residual_places: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    observers: Sequence[Observer | None],
    features: Features = ALL_FEATURES,
) -> Attend:
    """Returns an `Attend` whose state is the KVCache.

    Args:
      batches: the step's arrays on the device, of each group of layers; see `StepArrays.of_group`.
      patterns: int32 arrays [L]: traced, so that changing a window does not compile again.
      layers, ropes, angles: of each layer its spec, its rope, and the rope's angles at the step's text positions.
      num_repositioned_sinks: most sinks at "cache" or "ceiling" positions.
      sink_logits: logits [N] of each layer's heads (`models.params.sink_logits`), or None.
      alike: for each layer the first one with the same pattern in the same group: they share what the implementation
        schedules.
      places: of each layer its group and its index there, see `kv.layout.KVLayout.places`.
      residual_places: the same of exact keys and values beside codes, see `KVLayout.residual_places`; else empty.
      observers: of each layer, None where nothing is evicted.
      features: what programs are made of on the device.
    """
    plans: dict[int, Any] = {}

    def attend(layer: int, q, k, v, cache: KVCache):
        spec = layers[layer].attention
        group, at = places[layer]
        residual = None
        if residual_places:
            (k_group, k_at), (v_group, v_at) = residual_places[layer]
            residual = (k_at, batches[k_group]), (v_at, batches[v_group])
        context = AttentionContext(
            at,
            batches[group],
            shape,
            patterns.layer(layer),
            ropes[layer],
            num_repositioned_sinks,
            spec.soft_cap,
            sink_logits[layer],
            observers[layer],
            residual,
            features,
        )
        turns = angles[layer]
        if (observer := context.observer) is not None:
            cache = cache.enter(at, context.batch.slots, context.batch.positions)
            if observer.unrotated_keys:
                turns = context.rope.angles(context.batch.cache_positions)
        if implementation.schedule and alike[layer] not in plans:
            with jax.named_scope("attention"):
                plans[alike[layer]] = implementation.schedule(context, cache, spec.num_heads)
        with jax.named_scope("kv_write"):
            queries, cache = implementation.write(q, k, v, cache, context, turns, spec.scale)
        with jax.named_scope("attention"):
            out, masses = implementation.attend(queries, cache, context, plans.get(alike[layer]))
        for (_, _, tiles), mass in zip(shape.places(), masses):
            cache = cache.add_scores(at, context.batch.block_tables[tiles], mass)
        return out.astype(q.dtype), cache

    return attend
