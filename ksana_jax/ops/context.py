"""Inputs of attention besides queries, keys and values. Knows no pool."""

from __future__ import annotations

from typing import NamedTuple

import jax

from ksana_jax.core.patterns import PatternArrays
from ksana_jax.devices.features import ALL_FEATURES, Features
from ksana_jax.models.latents import Indexed
from ksana_jax.models.rope import Rope
from ksana_jax.ops.observation import AttentionObserver
from ksana_jax.scheduler.step.types import StepArrays, StepShape


class AttentionContext(NamedTuple):
    """Inputs of attention in one layer besides q, k and v: tables, positions, pattern, rope, caps and sinks.

    layer: index among the layers of a block. batch: block tables and positions, see `StepArrays.of_group`; for tokens
    that select blocks, tables and starts are [T, K, P], one for each token and kv head. Where groups
    of decodes share leading blocks, a decode row sees its group's table and then its own. pattern: which text
    positions a query sees, this layer's numbers. num_repositioned_sinks: maximum of a pattern. soft_cap:
    scores become cap * tanh(score / cap). sink_logits: [N], one logit per head, which joins the softmax's
    denominator. observer: None without an eviction method. residual: with a block codec, of the exact keys and
    of the exact values the layer's index in a block, and the batch with the tables of their group; else None.
    features: operations that programs may use on the device. alibi: [N], slopes of the heads (`models.alibi`) by
    positions in the cache; None without. indexed: products of the layer's indexer, rotated; None without.
    """

    layer: int
    batch: StepArrays
    shape: StepShape
    pattern: PatternArrays
    rope: Rope
    num_repositioned_sinks: int
    soft_cap: float | None = None
    sink_logits: jax.Array | None = None
    observer: AttentionObserver | None = None
    residual: tuple[tuple[int, StepArrays], tuple[int, StepArrays]] | None = None
    features: Features = ALL_FEATURES
    alibi: jax.Array | None = None
    indexed: Indexed | None = None
