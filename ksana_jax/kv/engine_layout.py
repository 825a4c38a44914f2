"""The layout of an engine's pool, from its settings."""

from __future__ import annotations

from collections.abc import Container, Sequence

from ksana_jax.core import refusals
from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.layout import KVLayout, codec_name
from ksana_jax.kv.selection import SelectionMethod, read_selection


def make_layout(
    model: ModelConfig, patterns: Sequence[AttentionPattern], config: EngineConfig, as_bits: Container[str] = ()
) -> KVLayout:
    """Returns the layout of an engine's pool; as_bits: see `KVLayout.of`.

    Raises:
      ConfigError: settings and model do not fit together.
    """
    selection = read_selection(config.kv_selection)
    layout = KVLayout.of(
        model,
        patterns,
        dtype=config.kv_dtype,
        block_size=config.block_size,
        as_bits=as_bits,
        eviction=read_eviction(config.kv_eviction),
        selection=selection,
        exact_dtype=config.dtype,
    )
    if exact := config.kv_full_precision_layers:
        raw = KVLayout.of(model, patterns, dtype=config.dtype, block_size=config.block_size, as_bits=as_bits)
        layout = layout.with_exact_layers(exact, raw.leaf("kv"))
    _check_stored(model, config, layout)
    if selection is not None:
        _check_selected(model, patterns, config, selection)
    return layout


def _check_stored(model: ModelConfig, config: EngineConfig, layout: KVLayout) -> None:
    """Refuses settings under which a pool of this layout would lack positions, or keep traces of later tokens."""
    method = None if layout.eviction is None else layout.eviction.method
    refusals.check(
        {
            refusals.ALIBI: model.alibi is not None,
            refusals.ABSOLUTE: method is not None
            and method.positions == "absolute"
            and f"kv_eviction {type(method).__name__} with positions 'absolute'",
            "speculative_config": config.speculative_config is not None,
            refusals.WHOLE_BLOCKS: layout.sealed is not None and f"kv_cache_dtype {codec_name(layout.codec)}",
            refusals.ADDS_UP_ATTENTION: method is not None
            and method.adds_up
            and f"kv_eviction {type(method).__name__}",
        }
    )


def _check_selected(
    model: ModelConfig, patterns: Sequence[AttentionPattern], config: EngineConfig, selection: SelectionMethod
) -> None:
    """Refuses settings under which queries could not select blocks, or summaries would mislead them."""
    selection.num_blocks(config.block_size)
    selection.in_layers(model.num_layers)
    refusals.check(
        {
            "kv_selection": True,
            refusals.ALIBI: model.alibi is not None,
            refusals.NOT_FULL: any(pattern != FULL for pattern in patterns),
        }
    )
