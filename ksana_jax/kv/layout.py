"""The layout of KV blocks: the arrays of a pool, and the layers that share a block. Knows layers, heads and bytes; no
jax, no owners.

This is the only place that knows how large a block is. Device pool, host slots and disk files hold whole blocks and map
over the leaves, so a codec that adds an array (scales, positions) changes nothing but the leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core import refusals, shared_kv
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import FULL, AttentionPattern, LiveRange, per_layer
from ksana_jax.kv.codecs.registry import find_codec, find_sealing
from ksana_jax.kv.codecs.sealing import Sealing
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.eviction.schedule import EvictionSchedule
from ksana_jax.kv.groups import KVGroup, group_layers, residual_groups
from ksana_jax.kv.selection.base import SelectionMethod, selecting_layers

# Types that a pool may store as unsigned integers of the same bits.
BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
# Name of the leaf with keys and values of layers in full precision, see `engine_layout`.
EXACT = "exact"
# Leaves that methods add: [Lg, 1, K, B] of `kv.eviction.base`, and [Lg, 1, K, *shape] of it and of `kv.selection.base`.
OF_TOKENS = SCORE, TEXT_POSITION, HIDDEN = "score", "text_position", "hidden"
STATE, SUMMARY = "state", "summary"
# Axis of kv heads in the shape of each leaf, after layers and keys or values.
KV_HEADS = 2


class Leaf(NamedTuple):
    """One array of the pool: [M, *shape], or [*shape] in one block. dtype is NumPy's name of its elements' type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes in one block."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Describes the contents of a pool's blocks.

    Args:
      groups: each block belongs to one of them and holds the layers of that group.
      block_size: B, tokens in a block.
      leaves: arrays of the pool; kv heads are a separate axis in each, so that a pool can be sharded by head.
      codec: how keys and values are encoded in the leaves, see `codecs.registry.find_codec`.
      eviction: when groups with a share of its budget evict tokens; None if none do.
      selection: method by which queries select the blocks that they read; None if they read all.
      selecting: layers in which they do.
      sealed: how blocks hold codes and exact tokens; None where a codec encodes each vector separately.
      sources: for each layer, or kv head of each layer, the one whose keys and values it reads; () if each has its own.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    leaves: tuple[Leaf, ...] = ()
    codec: str = "f32"
    eviction: EvictionSchedule | None = None
    sealed: SealedBlocks | None = None
    selection: SelectionMethod | None = None
    selecting: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        patterns: Sequence[AttentionPattern] | None = None,
        *,
        dtype: str | Mapping[str, Any],
        block_size: int,
        as_bits: Container[str] = (),
        eviction: EvictionMethod | None = None,
        selection: SelectionMethod | None = None,
        exact_dtype: str = "bf16",
    ) -> KVLayout:
        """Returns the layout of a model's pool.

        Args:
          patterns: one for each layer, or for each kv head of each layer; None takes the model's own.
          dtype: how keys and values are stored: "f32", "bf16", "f16" or another codec, see `EngineConfig`.
          as_bits: types stored as unsigned integers of the same bits, see `devices.capabilities.stored_as_bits`.
          eviction, selection: how full-attention layers evict tokens, and how their queries select blocks.
          exact_dtype: dtype of the exact tokens beside a block codec's codes: "f32", "bf16" or "f16".

        Raises:
          ConfigError: no layer can evict or select, or see `EvictionSchedule`.
        """
        seen = per_layer(model.pattern if patterns is None else patterns, model.num_layers, model.num_kv_heads)
        sources = shared_kv.sources(model.kv_layers, model.num_layers, len(seen))
        shared_kv.check_patterns(sources, seen)
        # A place has all heads of a layer, or a single one.
        model = dataclasses.replace(model, num_kv_heads=model.num_kv_heads * model.num_layers // len(seen))
        if (sealing := find_sealing(dtype)) is not None:
            name = f"kv_cache_dtype {codec_name(dtype)}"
            used = {"kv_eviction": eviction is not None, "kv_selection": selection is not None}
            refusals.check(used | {refusals.WHOLE_BLOCKS: name})
            return _sealed(model, seen, sources, sealing, dtype, exact_dtype, block_size)
        assert isinstance(dtype, str)
        layers = sorted(set(sources))
        groups = group_layers(seen, None if eviction is None else _shares(eviction, seen, layers), layers)
        num_layers, heads = len(groups[0].layers), model.num_kv_heads
        leaves = [
            Leaf(
                name,
                (num_layers, 2, heads, block_size, *of_vector),
                BITS[stored] if stored in BITS and stored in as_bits else stored,
            )
            for name, (of_vector, stored) in find_codec(dtype).arrays(model.head_dim).items()
        ]
        if selection is not None:
            leaves.append(Leaf(SUMMARY, (num_layers, 1, heads, *selection.summary_shape(model.head_dim)), "float32"))
        selects = {"selection": selection, "selecting": selecting_layers(selection, seen) if selection else ()}
        if eviction is None:
            return cls(groups, block_size, tuple(leaves), dtype, **selects, sources=sources)
        of_token = (num_layers, 1, heads, block_size)
        leaves += [Leaf(SCORE, of_token, "float32")] * eviction.observes
        leaves += [Leaf(TEXT_POSITION, of_token, "int32")] * eviction.needs_text_positions
        if (state := eviction.state_shape(model.num_heads // heads, model.head_dim)) is not None:
            leaves.append(Leaf(STATE, (*of_token[:-1], *state), "float32"))
        leaves += [Leaf(HIDDEN, of_token, "bool")] * eviction.hides
        schedule = EvictionSchedule(eviction, tuple(group.share for group in groups), block_size)
        return cls(groups, block_size, tuple(leaves), dtype, schedule, sources=sources)

    def with_patterns(self, patterns: Sequence[AttentionPattern]) -> KVLayout:
        """Returns this layout under other patterns, with the same groups: each keeps what any of its layers sees."""
        if len(patterns) != len(self.places):
            raise ConfigError(f"{refusals.BY_HEAD} need an engine that was made for them, and other patterns another")
        shared_kv.check_patterns(self.sources, patterns)
        for group in self.groups:
            if group.share is not None and any(patterns[layer] != FULL for layer in group.layers):
                raise ConfigError("kv_eviction evicts from layers with full attention: their pattern cannot change")
        if any(patterns[layer] != FULL for layer in self.selecting):
            raise ConfigError("kv_selection selects in layers with full attention: their pattern cannot change")

        def live(group: KVGroup) -> LiveRange:
            found = LiveRange.of([patterns[layer] for layer in group.layers])
            return self.sealed.sealing.residual_live(found) if self.sealed and group.residual else found

        return dataclasses.replace(self, groups=tuple(group._replace(live=live(group)) for group in self.groups))

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Returns for each layer, or kv head of each layer, the group of the keys and values that it reads, and their
        index there; of codes if they are."""
        groups = [(g, group) for g, group in enumerate(self.groups) if not group.residual]
        found = {layer: (g, at) for g, group in groups for at, layer in enumerate(group.layers)}
        return tuple(found[layer] for layer in self.sources or range(len(found)))

    @functools.cached_property
    def residual_places(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """Returns for each layer the places, as in `places`, of its exact keys and of its exact values beside a block
        codec's codes; empty without one."""
        found = {
            (layer, side): (g, at)
            for g, group in enumerate(self.groups)
            for at, (layer, side) in enumerate(zip(group.layers, group.residual))
        }
        order = self.sources or range(len(found) // 2)
        return tuple((found[layer, "k"], found[layer, "v"]) for layer in order if found)

    @property
    def selects_in(self) -> tuple[SelectionMethod | None, ...]:
        """Returns for each layer the method by which its queries select blocks; None if they read all that they see. A
        layer does as the one that stores its keys, and summarises them."""
        num_layers = len(self.places)
        found = (None,) * num_layers if self.selection is None else self.selection.in_layers(num_layers)
        return tuple(found[at] if at in self.selecting else None for at in self.sources or range(num_layers))

    @functools.cached_property
    def numbers_queries(self) -> EvictionMethod | SelectionMethod | None:
        """Returns the method that gives the queries of a step numbers, see `StepArrays.query_numbers`; None without."""
        method = self.selection if self.eviction is None else self.eviction.method
        return method if method is not None and method.weights_queries else None

    @property
    def evicts_from(self) -> tuple[EvictionMethod | None, ...]:
        """Returns for each layer the method that evicts from it; None without eviction."""
        method = self.eviction and self.eviction.method.compiled
        return tuple(None if self.groups[g].share is None else method for g, _ in self.places)

    def with_eviction(self, method: EvictionMethod) -> KVLayout:
        """Returns this layout with other numbers of its eviction method, such as the budget.

        Raises:
          ConfigError: programs that were compiled for this layout, or its groups of layers, do not fit the method.
        """
        mine = None if self.eviction is None else self.eviction.method
        if mine is None or mine.compiled != method.compiled or mine.shares(2) != method.shares(2):
            raise ConfigError(f"an engine with kv_eviction {mine} cannot change to {method}: make an engine for it")
        assert self.eviction is not None
        return dataclasses.replace(self, eviction=dataclasses.replace(self.eviction, method=method))

    @property
    def scored_groups(self) -> np.ndarray:
        """Groups whose blocks receive scores from every later query: bool [Gk]."""
        adds = self.eviction is not None and self.eviction.method.observes
        return np.array([adds and group.share is not None for group in self.groups])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers; with a block codec, of its codes."""
        return self.num_lasting_groups * self.block_bytes // self.block_size

    def bytes_per_token(self, num_tokens: int) -> float:
        """Returns `token_bytes`; with a block codec, the mean over the tokens that a sequence of num_tokens holds, as
        codes and as exact tokens beside them."""
        if self.sealed is None:
            return float(self.token_bytes)
        held = [group.live.num_live_blocks(self.block_size, num_tokens) for group in self.groups]
        coded = sum(held[: self.num_lasting_groups])
        return self.token_bytes * (sum(held) / coded if coded else 1.0)

    @property
    def num_lasting_groups(self) -> int:
        """Number of groups, without groups of exact tokens that a block codec's codes replace."""
        return sum(not group.residual for group in self.groups)

    def blocks_of(self, max_tokens: int, chunk: int = 1, num_prompt: int | None = None) -> int:
        """Returns the maximum number of blocks of a sequence in all groups; arguments as in `table_width`.

        Args:
          num_prompt: tokens of its prompt, on which evictions depend; None assumes the most blocks.
        """
        return sum(self._max_blocks(max_tokens, chunk, num_prompt))

    def blocks_to_finish(self, max_len: int, num_prompt: int) -> int:
        """Returns how many blocks a sequence that ends at max_len tokens, prompt included, needs to finish."""
        # The last token is sampled and never computed.
        return self.blocks_of(max(max_len - 1, 1), num_prompt=num_prompt)

    def leaf(self, name: str) -> Leaf:
        """Returns the leaf with this name; "kv" holds keys and values, or their codes."""
        return next(leaf for leaf in self.leaves if leaf.name == name)

    def table_width(self, max_tokens: int, chunk: int = 1) -> int:
        """Returns the maximum number of blocks of a sequence in one group, with chunks of up to `chunk` tokens.

        Args:
          max_tokens: length at which the sequence ends.
        """
        return max(self._max_blocks(max_tokens, chunk, None))

    def _max_blocks(self, max_tokens: int, chunk: int, num_prompt: int | None) -> list[int]:
        """Returns the maximum number of blocks of a sequence in each group."""
        found = [group.live.max_live_blocks(self.block_size, max_tokens, chunk) for group in self.groups]
        for index, group in enumerate(self.groups):
            if self.eviction is not None and group.share is not None:
                cached = self.eviction.max_cached(index, max_tokens, num_prompt)
                found[index] = min(found[index], -(-cached // self.block_size))
        return found

    @property
    def num_kv_heads(self) -> int:
        """K, of all leaves."""
        return self.leaf("kv").shape[KV_HEADS]

    def with_heads(self, num_kv_heads: int) -> KVLayout:
        """Returns this layout with another number of kv heads."""

        def changed(leaf: Leaf) -> Leaf:
            return leaf._replace(shape=(*leaf.shape[:KV_HEADS], num_kv_heads, *leaf.shape[KV_HEADS + 1 :]))

        return dataclasses.replace(self, leaves=tuple(map(changed, self.leaves)))

    def local(self, num_devices: int) -> KVLayout:
        """Returns one device's layout of a pool that several devices share by kv head: all blocks, only its heads.

        Raises:
          ValueError: the heads do not divide.
        """
        if num_devices < 1 or self.num_kv_heads % num_devices:
            raise ValueError(f"{self.num_kv_heads} kv heads cannot be divided among {num_devices} devices")
        return self.with_heads(self.num_kv_heads // num_devices)

    def split(self, blocks: np.ndarray) -> dict[str, np.ndarray]:
        """Returns views [n, *shape] of the leaves in blocks [n, block_bytes] of bytes, which hold leaf after leaf."""
        found, start = {}, 0
        for leaf in self.leaves:
            part = blocks[:, start : start + leaf.nbytes]
            found[leaf.name] = part.view(leaf.dtype).reshape(len(blocks), *leaf.shape)
            start += leaf.nbytes
        return found


class SealedBlocks(NamedTuple):
    """Defines how blocks hold the codes of a block codec, or exact tokens, as bytes.

    For each kv head, a block has either codes of all layers of a group, or exact keys or values of fewer layers.

    sealing: the codecs, and which tokens are read exactly. exact: NumPy's name of the exact numbers' type.
    """

    sealing: Sealing
    exact: str
    head_dim: int


def codec_name(dtype: str | Mapping[str, Any]) -> str:
    """Returns a `kv_cache_dtype` as text: "int8", or "k kivi2, v kivi4"."""
    return dtype if isinstance(dtype, str) else ", ".join(f"{key} {value}" for key, value in dtype.items())


def _sealed(
    model: ModelConfig,
    patterns: Sequence[AttentionPattern],
    sources: tuple[int, ...],
    sealing: Sealing,
    dtype: str | Mapping[str, Any],
    exact_dtype: str,
    block_size: int,
) -> KVLayout:
    """Returns the layout of a pool whose blocks hold codes of one group of layers, or exact tokens of another.

    All blocks have the size of a block of codes, unless one layer's keys need more.
    """
    layers = sorted(set(sources))
    groups = group_layers(patterns, layers=layers)
    [(_, exact)] = find_codec(sealing.residual_dtype or exact_dtype).arrays(model.head_dim).values()
    of_side = block_size * model.head_dim * np.dtype(exact).itemsize
    width = max(len(groups[0].layers) * sealing.head_bytes(block_size, model.head_dim), of_side)
    residual = residual_groups(patterns, layers, sealing, width // of_side)
    kv = Leaf("kv", (1, 1, model.num_kv_heads, width), "uint8")
    sealed = SealedBlocks(sealing, exact, model.head_dim)
    return KVLayout((*groups, *residual), block_size, (kv,), codec_name(dtype), sealed=sealed, sources=sources)


def _shares(
    eviction: EvictionMethod, patterns: Sequence[AttentionPattern], layers: Sequence[int]
) -> dict[int, float | None]:
    """Returns the share of the budget of each of some layers; None for those whose pattern is not full attention."""
    evicts = {layer: patterns[layer] == FULL for layer in layers}
    refusals.check({"kv_eviction": True, refusals.NO_FULL_LAYER: not any(evicts.values())})
    shares = iter(eviction.shares(sum(evicts.values())))
    return {layer: next(shares) if evicts[layer] else None for layer in layers}
