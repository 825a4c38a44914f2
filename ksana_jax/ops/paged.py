"""How queries meet keys in the engine: rotates, writes this step's keys and values to their blocks, attends."""

from __future__ import annotations

from ksana_jax.config import ModelConfig
from ksana_jax.kv.cache import KVCache
from ksana_jax.kv.patterns import PatternArrays
from ksana_jax.models.rope import Rope
from ksana_jax.models.transformer import Attend
from ksana_jax.ops.attention import Implementation, sink_query_positions
from ksana_jax.step import StepArrays, StepShape


def paged_attend(
    batch: StepArrays,
    shape: StepShape,
    patterns: PatternArrays,
    *,
    config: ModelConfig,
    rope: Rope,
    sink_width: int,
    implementation: Implementation,
) -> Attend:
    """An `Attend` whose state is the KVCache.

    Args:
      batch: the step's arrays, on the device.
      patterns: int32 arrays [L]: traced, so that changing a window does not compile anew.
      sink_width: leading block-table entries that can hold sinks at "cache" or "ceiling" positions; 0 skips the second
        rotation of the query.
    """
    angles = rope.angles(batch.positions)
    scale = config.head_dim**-0.5

    def attend(layer: int, q, k, v, cache: KVCache):
        pattern = patterns.layer(layer)
        cache = cache.write(layer, batch.slots, rope.rotate(k, angles), v)
        q = q * scale
        q_sink = None
        if sink_width:
            q_sink = rope.rotate(q, rope.angles(sink_query_positions(pattern, batch.positions)))
        q_here = rope.rotate(q, angles)
        out = implementation.attend(q_here, q_sink, cache, layer, batch, shape, pattern, rope, sink_width)
        return out.astype(q.dtype), cache

    return attend
