"""The layout of a model's pool: its leaves, by how tokens are stored, evicted and selected. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from ksana_jax.core import refusals, shared_kv
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import FULL, AttentionPattern, per_layer
from ksana_jax.kv.codecs.registry import LATENT_CODECS, find_codec, find_sealing
from ksana_jax.kv.codecs.sealing import Sealing
from ksana_jax.kv.codecs.slots import check_slots
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.eviction.schedule import EvictionSchedule
from ksana_jax.kv.groups import group_layers, residual_groups
from ksana_jax.kv.layout import (
    BITS,
    HIDDEN,
    INDEX_KEY,
    LOW,
    SCORE,
    STATE,
    SUMMARY,
    TEXT_POSITION,
    KVLayout,
    Leaf,
    SealedBlocks,
)
from ksana_jax.kv.selection.base import SelectionMethod, selecting_layers


def layout_of(
    model: ModelConfig,
    patterns: Sequence[AttentionPattern] | None = None,
    *,
    dtype: str | Mapping[str, Any],
    block_size: int,
    as_bits: Container[str] = (),
    eviction: EvictionMethod | None = None,
    selection: SelectionMethod | None = None,
    exact_dtype: str = "bf16",
    text_positions: bool = False,
) -> KVLayout:
    """Returns the layout of a model's pool.

    Args:
      patterns: one for each layer, or for each kv head of each layer; None takes the model's own.
      dtype: how keys and values are stored: "f32", "bf16", "f16" or another codec, see `EngineConfig`.
      as_bits: types stored as unsigned integers of the same bits, see `devices.capabilities.stored_as_bits`.
      eviction, selection: how full-attention layers evict tokens, and how their queries select blocks.
      exact_dtype: dtype of the exact tokens next to a block codec's codes, and of an indexer's keys: "f32", "bf16" or
        "f16".
      text_positions: whether slots that move hold the positions of their tokens, even if the method reads none.

    Raises:
      ConfigError: no layer can evict or select, or see `EvictionSchedule`.
    """
    seen = per_layer(model.pattern if patterns is None else patterns, model.num_layers, model.num_kv_heads)
    seen = with_heads_apart(seen, model, eviction)
    sources = shared_kv.sources(model.kv_layers, model.num_layers, len(seen))
    shared_kv.check_patterns(sources, seen)
    # A place has all heads of a layer, or a single one.
    heads_apart, num_queries = len(seen) // model.num_layers, model.num_heads // model.num_kv_heads
    model = dataclasses.replace(model, num_kv_heads=model.num_kv_heads // heads_apart)
    used = {"kv_eviction": eviction is not None, "kv_selection": selection is not None}
    used |= {refusals.LATENTS: model.latent is not None, refusals.RECURRENT: model.recurrent is not None}
    refusals.check(used)
    if eviction is not None and eviction.reads_outputs:
        refusals.check(used | {refusals.READS_OUTPUTS: f"kv_eviction {type(eviction).__name__}"})
    if eviction is not None and eviction.low_codec:
        refusals.check(used | {refusals.FEWER_BITS: f"kv_eviction {type(eviction).__name__}"})
    if (sealing := find_sealing(dtype)) is not None:
        name = f"kv_cache_dtype {codec_name(dtype)}"
        refusals.check(used | {refusals.WHOLE_BLOCKS: name})
        layout = _sealed(model, seen, sources, sealing, eviction, dtype, exact_dtype, block_size)
        return layout if eviction is None else _evicting(layout, eviction, sealing, num_queries, text_positions)
    assert isinstance(dtype, str)
    if dtype in LATENT_CODECS:
        _check_latent(model, dtype)
    layers = sorted(set(sources) - set(model.recurrent.layers if model.recurrent else ()))
    shares = None if eviction is None else _shares(eviction, seen, layers)
    groups = group_layers(seen, shares, layers, apart=eviction is not None and eviction.measures)
    num_layers, heads, sides = len(groups[0].layers), model.num_kv_heads, 2 if model.latent is None else 1

    def of_tokens(name: str, sides: int, of_vector: tuple[int, ...], stored: str) -> Leaf:
        stored = BITS[stored] if stored in BITS and stored in as_bits else stored
        return Leaf(name, (num_layers, sides, heads, block_size, *of_vector), stored)

    leaves = [of_tokens(name, sides, *array) for name, array in find_codec(dtype).arrays(model.head_dim).items()]
    if selection is not None and selection.by_token:
        indexer = model.latent and model.latent.indexer
        refusals.check({refusals.INDEXER: True, refusals.NO_INDEXER: indexer is None})
        assert indexer is not None
        [array] = find_codec(exact_dtype).arrays(indexer.head_dim).values()
        leaves.append(of_tokens(INDEX_KEY, 1, *array))
    elif selection is not None:
        leaves.append(Leaf(SUMMARY, (num_layers, 1, heads, *selection.summary_shape(model.head_dim)), "float32"))
    selects = {"selection": selection, "selecting": selecting_layers(selection, seen) if selection else ()}
    if eviction is None:
        return KVLayout(groups, block_size, tuple(leaves), dtype, **selects, sources=sources)
    if eviction.low_codec:
        check_slots(f"kv_eviction {type(eviction).__name__}", eviction.low_codec, model.head_dim, *leaves[0][1:])
    leaves += _eviction_leaves(
        eviction, (num_layers, 1, heads, block_size), num_queries, model.head_dim, text_positions
    )
    schedule = EvictionSchedule(eviction, tuple(group.share for group in groups), block_size, heads_apart)
    return KVLayout(groups, block_size, tuple(leaves), dtype, schedule, sources=sources)


def _eviction_leaves(
    eviction: EvictionMethod, of_token: tuple[int, ...], num_queries: int, head_dim: int, text_positions: bool
) -> list[Leaf]:
    """Returns the leaves that a method adds. of_token: Lg, 1, K and B. Others: see `layout_of` and `state_shape`."""
    num_layers, _, *others = of_token
    leaves = [Leaf(SCORE, (num_layers, eviction.num_scores(num_queries), *others), "float32")] * eviction.observes
    text_positions = eviction.needs_text_positions or (text_positions and not eviction.hides)
    leaves += [Leaf(TEXT_POSITION, of_token, "int32")] * text_positions
    if (state := eviction.state_shape(num_queries, head_dim)) is not None:
        leaves.append(Leaf(STATE, (*of_token[:-1], *state), "float32"))
    leaves += [Leaf(HIDDEN, of_token, "bool")] * eviction.hides
    return leaves + [Leaf(LOW, of_token, "uint8")] * bool(eviction.low_codec)


def _check_latent(model: ModelConfig, dtype: str) -> None:
    """Checks that a codec of latents encodes a model's latents apart from their rotated numbers."""
    refusals.check({f"kv_cache_dtype {dtype}": True, refusals.NO_LATENTS: model.latent is None})
    latent = model.latent
    codes = math.prod(find_codec(dtype).arrays(model.head_dim)["kv"][0])
    if latent is not None and latent.rank != codes:
        raise ConfigError(
            f"kv_cache_dtype {dtype} encodes {codes} of {model.head_dim} numbers of a token, the model's latent has "
            f"{latent.rank}: it must be a multiple of 128, with fewer than 128 rotated numbers next to it"
        )


def with_heads_apart(
    patterns: Sequence[AttentionPattern], model: ModelConfig, eviction: EvictionMethod | None
) -> Sequence[AttentionPattern]:
    """Returns patterns of layers, repeated for each kv head if a method measures budgets of heads."""
    if eviction is None or not (eviction.measures and eviction.per_head) or len(patterns) > model.num_layers:
        return patterns
    return tuple(pattern for pattern in patterns for _ in range(model.num_kv_heads))


def codec_name(dtype: str | Mapping[str, Any]) -> str:
    """Returns a `kv_cache_dtype` as text: "int8", or "k kivi2, v kivi4"."""
    return dtype if isinstance(dtype, str) else ", ".join(f"{key} {value}" for key, value in dtype.items())


def _sealed(
    model: ModelConfig,
    patterns: Sequence[AttentionPattern],
    sources: tuple[int, ...],
    sealing: Sealing,
    eviction: EvictionMethod | None,
    dtype: str | Mapping[str, Any],
    exact_dtype: str,
    block_size: int,
) -> KVLayout:
    """Returns the layout of a pool whose blocks hold codes of one group of layers, or exact tokens of another.

    All blocks have the size of a block of codes, unless one layer's keys need more.
    """
    layers = sorted(set(sources) - set(model.recurrent.layers if model.recurrent else ()))
    shares = None if eviction is None else _shares(eviction, patterns, layers)
    groups = group_layers(patterns, shares, layers)
    [(_, exact)] = find_codec(sealing.residual_dtype or exact_dtype).arrays(model.head_dim).values()
    of_side = block_size * model.head_dim * np.dtype(exact).itemsize
    width = max(len(groups[0].layers) * sealing.head_bytes(block_size, model.head_dim), of_side)
    residual = residual_groups(patterns, layers, sealing, width // of_side)
    kv = Leaf("kv", (1, 1, model.num_kv_heads, width), "uint8")
    sealed = SealedBlocks(sealing, exact, model.head_dim, len(groups[0].layers))
    return KVLayout((*groups, *residual), block_size, (kv,), codec_name(dtype), sealed=sealed, sources=sources)


def _evicting(
    layout: KVLayout, eviction: EvictionMethod, sealing: Sealing, num_queries: int, text_positions: bool
) -> KVLayout:
    """Returns the layout of a pool of a block codec whose rows evict; exact tokens stay in blocks of their own."""
    assert layout.sealed is not None
    name, codec = f"kv_eviction {type(eviction).__name__}", f"kv_cache_dtype {layout.codec}"
    rewrites = eviction.merges or eviction.hides or eviction.measures or eviction.probes or bool(eviction.low_codec)
    absolute = eviction.positions == "absolute" and f"{name} with positions 'absolute'"
    read_rotated = sealing.k.unrotated_keys and codec
    refusals.check({refusals.WHOLE_BLOCKS: codec, refusals.REWRITES: rewrites and name})
    refusals.check({refusals.ROTATES_READ: read_rotated, refusals.ABSOLUTE: absolute})
    of_token = layout.sealed.num_layers, 1, layout.num_kv_heads, layout.block_size
    leaves = _eviction_leaves(eviction, of_token, num_queries, layout.sealed.head_dim, text_positions)
    shares, exact = tuple(group.share for group in layout.groups), sealing.num_exact(layout.block_size)
    schedule = EvictionSchedule(eviction, shares, layout.block_size, exact=exact, first=sealing.first)
    return dataclasses.replace(layout, leaves=(*layout.leaves, *leaves), eviction=schedule)


def _shares(
    eviction: EvictionMethod, patterns: Sequence[AttentionPattern], layers: Sequence[int]
) -> dict[int, float | None]:
    """Returns the share of the budget of each of some layers; None for those whose pattern is not full attention."""
    evicts = {layer: patterns[layer] == FULL for layer in layers}
    refusals.check({"kv_eviction": True, refusals.NO_FULL_LAYER: not any(evicts.values())})
    shares = iter(eviction.shares(sum(evicts.values())))
    return {layer: next(shares) if evicts[layer] else None for layer in layers}
