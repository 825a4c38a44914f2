"""Groups of layers that share a block table, and hold equally many layers. Knows patterns; no heads, no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.kv.codecs.sealing import Sealing
from ksana_jax.kv.visible_range import VisibleRange


class KVGroup(NamedTuple):
    """Layers that share a block table. Where the kv heads of a layer have different patterns, each counts as a layer.

    live: positions that later queries of at least one of them attend to. share: of an eviction method's budget, see
    `EvictionMethod.shares`; None if they evict nothing. residual: if its blocks hold exact tokens next to the codes
    in blocks of other groups (`kv.codecs.sealing`), the side, "k" or "v", of each entry of layers; else ().
    """

    layers: tuple[int, ...]
    live: VisibleRange
    share: float | None = None
    residual: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Distinguishes this group's blocks in prefix-cache keys."""
        return f"{self.residual} of {self.layers}" if self.residual else repr(self.layers)


def group_layers(
    patterns: Sequence[AttentionPattern],
    shares: Mapping[int, float | None] | Sequence[float | None] | None = None,
    layers: Iterable[int] | None = None,
    apart: bool = False,
) -> tuple[KVGroup, ...]:
    """Groups layers that keep the same positions, or equally many, with the same number of layers per group, so that
    all blocks have the same size and one free list serves all groups.

    8 sliding and 4 full layers are three groups of 4. The last group of a kind may have fewer layers, and its blocks
    unused room: at most an eighth of the size of that kind's layers.

    Args:
      shares: of the budget of an eviction method, by layer; see `KVGroup`.
      layers: that have keys and values of their own; None for all.
      apart: whether each layer is a group of its own.
    """
    kinds: dict[tuple[VisibleRange, float | None], list[int]] = {}
    for layer in range(len(patterns)) if layers is None else layers:
        kinds.setdefault((VisibleRange.of([patterns[layer]]), shares[layer] if shares else None), []).append(layer)
    size = max(
        size
        for size in range(1, 2 if apart else sum(map(len, kinds.values())) + 1)
        if all(8 * (-len(alike) % size) <= len(alike) for alike in kinds.values())
    )
    return tuple(
        KVGroup(tuple(alike[start : start + size]), live, share)
        for (live, share), alike in kinds.items()
        for start in range(0, len(alike), size)
    )


def residual_groups(
    patterns: Sequence[AttentionPattern], layers: Iterable[int], sealing: Sealing, sides_of_block: int
) -> tuple[KVGroup, ...]:
    """Returns the groups of exact tokens next to a block codec's codes, with as many sides of layers, "k" or "v", as a
    block holds."""
    kinds: dict[VisibleRange, list[tuple[int, str]]] = {}
    for layer in layers:
        live = sealing.residual_live(VisibleRange.of([patterns[layer]]))
        kinds.setdefault(live, []).extend([(layer, "k"), (layer, "v")])
    found = []
    for live, sides in kinds.items():
        for start in range(0, len(sides), sides_of_block):
            layers, of_each = zip(*sides[start : start + sides_of_block], strict=True)
            found.append(KVGroup(layers, live, residual=of_each))
    return tuple(found)
