"""The layout of KV blocks: the arrays of a pool, and the layers that share a block. Knows layers, heads and bytes; no
jax, no owners.

This is the only place that knows how large a block is. Device pool, host slots and disk files hold whole blocks and map
over the leaves, so a codec that adds an array (scales, positions) changes nothing but the leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ksana_jax.config import ConfigError, ModelConfig
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.patterns import AttentionPattern, LiveRange, per_layer

# Types whose bits are stored on a CPU: XLA:CPU converts a whole pool of them at each scatter (bfloat16: 110 ms for 128
# MB on jax 0.10.2, against 0.01 ms for uint16 and float16).
BITS_ON_CPU = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

# Name of the leaf with keys and values of layers in full precision, see `KVLayout.with_exact_layers`.
EXACT = "exact"
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
class KVGroup:
    """Layers that share a block table.

    live: what later queries of at least one of them can still see.
    """

    layers: tuple[int, ...]
    live: LiveRange


def group_layers(patterns: Sequence[AttentionPattern]) -> tuple[KVGroup, ...]:
    """Groups layers that keep the same positions, with the same number of layers per group, so that all blocks have
    the same size and one free list serves all groups.

    8 sliding and 4 full layers are three groups of 4. The last group of a kind may have fewer layers, and its blocks
    unused room: at most an eighth of what the layers of that kind take.
    """
    kinds: dict[LiveRange, list[int]] = {}
    for layer, pattern in enumerate(patterns):
        kinds.setdefault(LiveRange.of([pattern]), []).append(layer)
    size = max(
        size
        for size in range(1, len(patterns) + 1)
        if all(8 * (-len(layers) % size) <= len(layers) for layers in kinds.values())
    )
    return tuple(
        KVGroup(tuple(layers[start : start + size]), live)
        for live, layers in kinds.items()
        for start in range(0, len(layers), size)
    )


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """Describes the contents of a pool's blocks.

    Args:
      groups: each block belongs to one of them and holds the layers of that group.
      block_size: B, tokens in a block.
      leaves: arrays of the pool; kv heads are an axis of their own in each, so that a pool can be sharded by head.
      codec: how keys and values are encoded in the leaves, see `codecs.registry.find_codec`.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    leaves: tuple[Leaf, ...] = ()
    codec: str = "f32"

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        patterns: Sequence[AttentionPattern] | None = None,
        *,
        dtype: str,
        block_size: int,
        platform: str,
    ) -> KVLayout:
        """Returns the layout of a model's pool.

        Args:
          patterns: one for each layer; None takes the model's own.
          dtype: how keys and values are stored: "f32", "bf16", "f16" or another codec.
          platform: "cpu", "gpu", "tpu", ...; changes how numbers are stored, not how many bytes they take.
        """
        groups = group_layers(per_layer(model.pattern if patterns is None else patterns, model.num_layers))
        shape = (len(groups[0].layers), 2, model.num_kv_heads, block_size)
        bits = BITS_ON_CPU if platform == "cpu" else {}
        arrays = find_codec(dtype).arrays(model.head_dim).items()
        leaves = (Leaf(name, (*shape, *of_vector), bits.get(stored, stored)) for name, (of_vector, stored) in arrays)
        return cls(groups, block_size, tuple(leaves), dtype)

    def with_patterns(self, patterns: Sequence[AttentionPattern]) -> KVLayout:
        """Returns this layout under other patterns. A group keeps what any of its layers sees: blocks stay as
        they are, and least is kept by an engine that was made with these patterns."""
        groups = (KVGroup(g.layers, LiveRange.of([patterns[layer] for layer in g.layers])) for g in self.groups)
        return dataclasses.replace(self, groups=tuple(groups))

    def with_exact_layers(self, layers: Sequence[int], kv: Leaf) -> KVLayout:
        """Returns this layout with some layers in full precision, beside the codes of the others in the same blocks.

        Those layers come first in their groups. All blocks have the same size, so every group has as many of them.

        Args:
          kv: the leaf that would hold all layers of a group in full precision.

        Raises:
          ConfigError: there is no such layer, all are in full precision, or groups differ in their number.
        """
        last = len(self.places) - 1
        if layers and max(layers) > last:
            raise ConfigError(f"kv_full_precision_layers has {max(layers)}, the model has layers 0 to {last}")
        counts = [sum(layer in layers for layer in group.layers) for group in self.groups]
        if len(set(counts)) > 1:
            held = ", ".join(f"{count} of {group.layers}" for count, group in zip(counts, self.groups, strict=True))
            raise ConfigError(f"kv_full_precision_layers must be equally many in each group of layers: they are {held}")
        if (num_coded := len(self.groups[0].layers) - counts[0]) < 1:
            raise ConfigError("kv_full_precision_layers has all layers: leave kv_cache_dtype as it is")
        order = [tuple(sorted(group.layers, key=lambda layer: layer not in layers)) for group in self.groups]
        groups = (KVGroup(layers, group.live) for layers, group in zip(order, self.groups, strict=True))
        leaves = (leaf._replace(shape=(num_coded, *leaf.shape[1:])) for leaf in self.leaves)
        exact = Leaf(EXACT, (counts[0], *kv.shape[1:]), kv.dtype)
        return dataclasses.replace(self, groups=tuple(groups), leaves=(*leaves, exact))

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Returns for each layer its group, and its index among the group's layers."""
        found = {layer: (g, at) for g, group in enumerate(self.groups) for at, layer in enumerate(group.layers)}
        return tuple(found[layer] for layer in range(len(found)))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all leaves."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return len(self.groups) * self.block_bytes // self.block_size

    def blocks_of(self, max_tokens: int, chunk: int = 1) -> int:
        """Returns the maximum number of blocks of a sequence in all groups; arguments as in `table_width`."""
        return sum(group.live.max_live_blocks(self.block_size, max_tokens, chunk) for group in self.groups)

    def leaf(self, name: str) -> Leaf:
        """Returns the leaf with this name; "kv" holds keys and values, or their codes."""
        return next(leaf for leaf in self.leaves if leaf.name == name)

    def table_width(self, max_tokens: int, chunk: int = 1) -> int:
        """Returns the maximum number of blocks of a sequence in one group, with chunks of up to `chunk` tokens.

        Args:
          max_tokens: length at which the sequence ends.
        """
        return max(group.live.max_live_blocks(self.block_size, max_tokens, chunk) for group in self.groups)

    def local(self, num_devices: int) -> KVLayout:
        """Returns one device's layout of a pool that several devices share by kv head: all blocks, only its heads.

        Raises:
          ValueError: the heads do not divide.
        """
        heads = self.leaf("kv").shape[KV_HEADS]
        if num_devices < 1 or heads % num_devices:
            raise ValueError(f"{heads} kv heads cannot be divided among {num_devices} devices")

        def share(leaf: Leaf) -> Leaf:
            before, after = leaf.shape[:KV_HEADS], leaf.shape[KV_HEADS + 1 :]
            return leaf._replace(shape=(*before, leaf.shape[KV_HEADS] // num_devices, *after))

        return dataclasses.replace(self, leaves=tuple(map(share, self.leaves)))

    def split(self, blocks: np.ndarray) -> dict[str, np.ndarray]:
        """Returns views [n, *shape] of the leaves in blocks [n, block_bytes] of bytes, which hold leaf after leaf."""
        found, start = {}, 0
        for leaf in self.leaves:
            part = blocks[:, start : start + leaf.nbytes]
            found[leaf.name] = part.view(leaf.dtype).reshape(len(blocks), *leaf.shape)
            start += leaf.nbytes
        return found
