"""The layout of KV blocks: the arrays of a pool, and the layers that share a block. Knows layers, heads and bytes; no
jax, no owners.

This is the only place that knows how large a block is. Device pool, host slots and disk files hold whole blocks and map
over the leaves, so a codec that adds an array (scales, positions) changes nothing but the leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ksana_jax.core import refusals, shared_kv
from ksana_jax.core.config import ConfigError
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.kv.codecs.sealing import Sealing
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.eviction.schedule import EvictionSchedule
from ksana_jax.kv.groups import KVGroup
from ksana_jax.kv.leaf import KV_HEADS, Leaf
from ksana_jax.kv.selection.base import SelectionMethod
from ksana_jax.kv.state_layout import StateLayout
from ksana_jax.kv.visible_range import VisibleRange

# Types that a pool may store as unsigned integers of the same bits.
BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
# Name of the leaf with keys and values of layers in full precision, see `engine_layout`.
EXACT = "exact"
# Leaves that methods add: [Lg, 1, K, B] of `kv.eviction.base`, and [Lg, 1, K, *shape] of it and of `kv.selection.base`.
OF_TOKENS = SCORE, TEXT_POSITION, HIDDEN, LOW = "score", "text_position", "hidden", "low"
STATE, SUMMARY = "state", "summary"
# Keys of an indexer, [Lg, 1, 1, B, size].
INDEX_KEY = "index_key"


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
      states: of recurrent layers, which no block holds; None without any.
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
    states: StateLayout | None = None

    @property
    def group_keys(self) -> list[str]:
        """Distinguishes the groups in prefix-cache keys, the states' last; the only group of blocks is empty, so that
        its blocks have the keys of `hashes_of`."""
        keys = [group.key for group in self.groups] if len(self.groups) != 1 else [""]
        return [*keys, *([self.states.group.key] if self.states else [])]

    @property
    def of_states(self) -> KVLayout | None:
        """Returns the layout of slots for states, as one of blocks; None without any."""
        states = self.states
        return states and KVLayout((states.group,), self.block_size, states.leaves, self.codec)

    def state_bytes_of(self, num_bytes: int, num_blocks: int) -> int:
        """Returns how many bytes on the host or on disk are for states, if they are divided as the device's are between
        num_blocks blocks and the slots; at least one slot's."""
        if self.states is None:
            return 0
        part = num_bytes * self.states.nbytes // (self.states.nbytes + num_blocks * self.block_bytes)
        return min(num_bytes, max(part, self.states.slot_bytes))

    def with_patterns(self, patterns: Sequence[AttentionPattern]) -> KVLayout:
        """Returns this layout under other patterns, with the same groups: each keeps what one of its layers needs."""
        if len(patterns) != len(self.places):
            raise ConfigError(f"{refusals.BY_HEAD} need an engine that was made for them, and other patterns another")
        shared_kv.check_patterns(self.sources, patterns)
        for group in self.groups:
            if group.share is not None and any(patterns[layer] != FULL for layer in group.layers):
                raise ConfigError("kv_eviction evicts from layers with full attention: their pattern cannot change")
        if any(patterns[layer] != FULL for layer in self.selecting):
            raise ConfigError("kv_selection selects in layers with full attention: their pattern cannot change")

        def live(group: KVGroup) -> VisibleRange:
            found = VisibleRange.of([patterns[layer] for layer in group.layers])
            return self.sealed.sealing.residual_live(found) if self.sealed and group.residual else found

        return dataclasses.replace(self, groups=tuple(group._replace(live=live(group)) for group in self.groups))

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Returns for each layer, or kv head of each layer, the group of the keys and values that it reads, and their
        index there; of codes if they are. For a recurrent layer, 0 and its index among the states."""
        groups = [(g, group) for g, group in enumerate(self.groups) if not group.residual]
        found = {layer: (g, at) for g, group in groups for at, layer in enumerate(group.layers)}
        if self.states is not None:
            found |= {layer: (0, at) for at, layer in enumerate(self.states.layers)}
        return tuple(found[layer] for layer in self.sources or range(len(found)))

    @functools.cached_property
    def residual_places(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """Returns for each layer the places, as in `places`, of its exact keys and of its exact values next to a block
        codec's codes; empty without one. For a recurrent layer, any."""
        found = {
            (layer, side): (g, at)
            for g, group in enumerate(self.groups)
            for at, (layer, side) in enumerate(zip(group.layers, group.residual))
        }
        if found and self.states is not None:
            found |= {(layer, side): (0, 0) for layer in self.states.layers for side in "kv"}
        order = self.sources or range(len(found) // 2)
        return tuple((found[layer, "k"], found[layer, "v"]) for layer in order if found)

    @property
    def selects_in(self) -> tuple[SelectionMethod | None, ...]:
        """Returns for each layer the method by which its queries select blocks; None if they read all blocks. A layer
        does as the one that stores its keys, and summarises them."""
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
        if not self.compiled_for(method):
            mine = self.eviction and self.eviction.method
            raise ConfigError(f"an engine with kv_eviction {mine} cannot change to {method}: make an engine for it")
        assert self.eviction is not None
        return dataclasses.replace(self, eviction=dataclasses.replace(self.eviction, method=method))

    def compiled_for(self, method: EvictionMethod) -> bool:
        """True if this layout and the programs compiled for it serve the method too."""
        mine = self.eviction and self.eviction.method
        return mine is not None and mine.compiled == method.compiled and mine.shares(2) == method.shares(2)

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
        codes and as exact tokens next to them."""
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
    def num_sides(self) -> int:
        """X, of keys and values: 2, or 1 if they are the same vectors."""
        return 2 if self.sealed else self.leaf("kv").shape[KV_HEADS - 1]

    @property
    def num_kv_heads(self) -> int:
        """K, of all leaves."""
        return self.leaf("kv").shape[KV_HEADS]

    def with_heads(self, num_kv_heads: int) -> KVLayout:
        """Returns this layout with another number of kv heads."""
        return dataclasses.replace(self, leaves=tuple(leaf.with_heads(num_kv_heads) for leaf in self.leaves))

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

    sealing: the codecs, and which tokens are read exactly. exact: NumPy's name of the exact numbers' type. num_layers:
      Lg, of a block of codes.
    """

    sealing: Sealing
    exact: str
    head_dim: int
    num_layers: int
