"""The layout of an engine's pool, from its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from ksana_jax.core import refusals
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.layout import EXACT, OF_TOKENS, STATE, KVLayout, Leaf
from ksana_jax.kv.model_layout import codec_name, layout_of
from ksana_jax.kv.selection import read_selection
from ksana_jax.kv.state_layout import SLOTS_PER_ROW, state_layout
from ksana_jax.kv.state_snapshots import read_state_snapshots


def make_layout(
    model: ModelConfig, patterns: Sequence[AttentionPattern], config: EngineConfig, as_bits: Container[str] = ()
) -> KVLayout:
    """Returns the layout of an engine's pool; as_bits: see `layout_of`.

    Raises:
      ConfigError: settings and model do not fit together.
    """
    eviction = read_eviction(config.kv_eviction)
    apart = eviction is not None and eviction.measures and eviction.per_head
    used = config.used() | {refusals.HEADS_APART: apart and f"kv_eviction {type(eviction).__name__}"}
    selection, indexer = read_selection(config.kv_selection), model.latent and model.latent.indexer
    if selection is None and indexer is not None:
        selection = read_selection({"method": "lightning_indexer", "budget": indexer.top_k})
        used["kv_selection"] = "the model's kv_selection lightning_indexer"
    refusals.check(used)
    if selection is not None:
        selection.num_blocks(config.block_size)
    layout = layout_of(
        model,
        patterns,
        dtype=config.kv_dtype,
        block_size=config.block_size,
        as_bits=as_bits,
        eviction=eviction,
        selection=selection,
        exact_dtype=config.dtype,
        text_positions=config.kept_tokens,
    )
    if model.recurrent is not None:
        refusals.check({refusals.RECURRENT: True, refusals.CACHES_EVICTED: config.enable_prefix_caching and eviction})
        [(_, dtype)] = find_codec(config.dtype).arrays(model.head_dim).values()
        layout = dataclasses.replace(layout, states=state_layout(model, dtype, num_state_slots(config)))
    if exact := config.kv_full_precision_layers:
        raw = layout_of(model, patterns, dtype=config.dtype, block_size=config.block_size, as_bits=as_bits)
        layout = _with_exact_layers(layout, exact, raw.leaf("kv"))
    _check_stored(model, config, layout)
    if selection is not None:
        refusals.check({"kv_selection": True, refusals.ALIBI: model.alibi is not None})
    return layout


def _with_exact_layers(layout: KVLayout, layers: Sequence[int], kv: Leaf) -> KVLayout:
    """Returns a layout with some layers in full precision, next to the other layers' codes in the same blocks.

    Those layers come first in their groups. All blocks have the same size, so every group has equally many of them.

    Args:
      kv: the leaf that would hold all layers of a group in full precision.

    Raises:
      ConfigError: a layer does not exist or stores nothing, all are in full precision, or groups differ in number.
    """
    sealed = layout.sealed is not None and f"kv_cache_dtype {layout.codec}"
    method = layout.eviction and layout.eviction.method
    few_bits = method is not None and bool(method.low_codec) and f"kv_eviction {type(method).__name__}"
    refusals.check({refusals.WHOLE_BLOCKS: sealed, refusals.FEWER_BITS: few_bits, "kv_full_precision_layers": True})
    last, sources = len(layout.places) - 1, layout.sources
    if max(layers) > last:
        raise ConfigError(f"kv_full_precision_layers has {max(layers)}, the model has layers 0 to {last}")
    without = [f"{layer} reads layer {sources[layer]}" for layer in layers if sources[layer] != layer]
    without += [f"{layer} is recurrent" for layer in layers if layout.states and layer in layout.states.layers]
    if without:
        raise ConfigError(f"kv_full_precision_layers has layers without keys and values: {', '.join(without)}")
    counts = [sum(layer in layers for layer in group.layers) for group in layout.groups]
    if len(set(counts)) > 1:
        held = ", ".join(f"{count} of {group.layers}" for count, group in zip(counts, layout.groups, strict=True))
        refusals.check({"kv_full_precision_layers": True, refusals.UNEVEN: f"{refusals.UNEVEN} ({held})"})
    if (num_coded := len(layout.groups[0].layers) - counts[0]) < 1:
        raise ConfigError("kv_full_precision_layers has all layers: leave kv_cache_dtype as it is")
    order = [tuple(sorted(group.layers, key=lambda layer: layer not in layers)) for group in layout.groups]
    groups = (group._replace(layers=layers) for layers, group in zip(order, layout.groups, strict=True))
    leaves = (
        leaf if leaf.name in (*OF_TOKENS, STATE) else leaf._replace(shape=(num_coded, *leaf.shape[1:]))
        for leaf in layout.leaves
    )
    exact = Leaf(EXACT, (counts[0], *kv.shape[1:]), kv.dtype)
    return dataclasses.replace(layout, groups=tuple(groups), leaves=(*leaves, exact))


def num_state_slots(config: EngineConfig) -> int:
    """Returns the number of slots for states of recurrent layers.

    Raises:
      ConfigError: the setting has too few.
    """
    caching, rows = config.enable_prefix_caching, config.max_num_seqs
    least = 2 * rows if caching else rows
    if (given := read_state_snapshots(config.state_snapshots).num_slots) is None:
        return (SLOTS_PER_ROW + caching) * rows
    if given < least:
        each = "two for each row with a prefix cache" if caching else "one for each row"
        raise ConfigError(f"state_snapshots has num_slots {given}, max_num_seqs {rows} needs {least}, {each}")
    return given


def _check_stored(model: ModelConfig, config: EngineConfig, layout: KVLayout) -> None:
    """Refuses settings under which a pool of this layout would lack positions, or keep traces of later tokens."""
    method = None if layout.eviction is None else layout.eviction.method
    refusals.check(
        {
            refusals.ALIBI: model.alibi is not None,
            refusals.ABSOLUTE: method is not None
            and method.positions == "absolute"
            and f"kv_eviction {type(method).__name__} with positions 'absolute'",
            refusals.COMPARES_HEADS: method is not None
            and model.num_kv_heads % config.tensor_parallel_size != 0
            and f"kv_eviction {type(method).__name__}",
            "tensor_parallel_size": config.used()["tensor_parallel_size"],
            "speculative_config": config.speculative_config is not None,
            refusals.WHOLE_BLOCKS: layout.sealed is not None and f"kv_cache_dtype {codec_name(layout.codec)}",
            refusals.ADDS_UP_ATTENTION: method is not None
            and method.adds_up
            and f"kv_eviction {type(method).__name__}",
        }
    )
