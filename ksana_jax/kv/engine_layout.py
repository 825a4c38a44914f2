"""The layout of an engine's pool, from its settings."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ksana_jax.config import EngineConfig, ModelConfig
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.layout import KVLayout
from ksana_jax.patterns import AttentionPattern


def make_layout(
    model: ModelConfig, patterns: Sequence[AttentionPattern], config: EngineConfig, as_bits: Container[str] = ()
) -> KVLayout:
    """Returns the layout of an engine's pool; as_bits: see `KVLayout.of`.

    Raises:
      ConfigError: settings and model do not fit together.
    """
    layout = KVLayout.of(
        model,
        patterns,
        dtype=config.kv_dtype,
        block_size=config.block_size,
        as_bits=as_bits,
        eviction=read_eviction(config.kv_eviction),
        exact_dtype=config.dtype,
    )
    if exact := config.kv_full_precision_layers:
        raw = KVLayout.of(model, patterns, dtype=config.dtype, block_size=config.block_size, as_bits=as_bits)
        layout = layout.with_exact_layers(exact, raw.leaf("kv"))
    return layout
