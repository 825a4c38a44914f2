"""The fake network on a pool of a block codec: exact keys and values of the newest tokens, and codes of full blocks.

A query reads hashes of the pool: of decoded codes, or of exact keys and values, which are in blocks of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.kv.layout import OF_TOKENS, SCORE, STATE
from ksana_jax.kv.moves import Evictions
from ksana_jax.scheduler.step.types import StepArrays
from tests.fake_network import HEAD_DIM, attend, weights_of
from tests.fake_pool import StoringExecutor, digest, vectors

_VECTOR = 4 * HEAD_DIM  # bytes


class SealingExecutor(StoringExecutor):
    """A `StoringExecutor` whose layout has a block codec."""

    def _attend(self, layer: int, a: StepArrays, groups: list, tile_of: np.ndarray, hidden: np.ndarray) -> np.ndarray:
        self._write(layer, a, hidden)
        self._seal(layer, a)
        (group, at), (exact, _) = self.layout.places[layer], self.layout.residual_places[layer]
        self._enter(at, a, group, hidden)
        q, sealed = a.cache_positions[group][:, None], self.layout.sealed
        visible, weighed = [], []
        assert sealed is not None
        with np.errstate(all="ignore"):  # there is noise in slots that no query reads
            for source, keys, is_code in (
                (groups[group], self._codes(layer, groups[group][0]), True),
                (groups[exact[0]], self._exact(layer, groups), False),
            ):
                positions, keys = source[1][tile_of], keys[tile_of]
                if not is_code:  # their blocks begin at positions of the text; the first tokens are sinks
                    cached = positions - (a.positions[:, None] - q)
                    cached = np.where(cached < sealed.sealing.first, FAR, cached)
                    positions = np.where((positions < sealed.sealing.first) | (positions >= FAR), positions, cached)
                seen = self._patterns[layer].visible(q, positions) & (self._reads_codes(q, positions) == is_code)
                visible.append(seen)
                weighed.append(keys * weights_of(positions))
                if self._evicts(group) and seen.any():
                    table = groups[group][0][tile_of]
                    slots = np.take_along_axis(table, np.minimum(positions, table.shape[1] - 1), axis=1)
                    self._observe(at, a, group, hidden, (keys, slots, seen))
        return attend(hidden, np.hstack(weighed), np.hstack(visible))

    def _part(self, at: int) -> tuple[str, dict[str, np.ndarray], int]:
        return "", {}, at  # of codes, whole blocks move

    def _decoded(self, at: int, get) -> list[np.ndarray]:
        assert self.layout.sealed is not None
        sealing, size = self.layout.sealed.sealing, self.block_size
        num = sealing.head_bytes(size, HEAD_DIM)
        pair = sealing.decoded(self._bytes(np.arange(self.num_blocks), at * num, num), size, HEAD_DIM, np)
        return [get(x[:, None, None, None], 0, 0).astype(np.float32) for x in pair]

    def _evict(self, asked: Evictions) -> np.ndarray:
        """The method sees full blocks, and blocks whose tokens part are decoded and encoded again."""
        assert self.layout.sealed is not None and STATE not in self.leaves
        size, sealing, is_open = self.block_size, self.layout.sealed.sealing, asked.num_tokens % self.block_size
        of_full = {name: getattr(asked, name) - is_open for name in ("num_tokens", "num_recent", "num_kept")}
        num, layers = sealing.head_bytes(size, HEAD_DIM), self.layout.sealed.num_layers
        kept, count = (int(of_full[name][0]) // size for name in ("num_kept", "num_tokens"))
        blocks, targets = asked.tables[0, :count], asked.targets[0]
        with np.errstate(all="ignore"):  # the last group of a kind may have fewer layers
            codes = [self._bytes(blocks, at * num, num) for at in range(layers)]
            decoded = [[x.reshape(-1, HEAD_DIM) for x in sealing.decoded(x, size, HEAD_DIM, np)] for x in codes]
            names = [name for name in OF_TOKENS if name in self.leaves and is_open[0]]
            ends = {name: self.leaves[name][asked.tables[0, count]].copy() for name in names}
            sources = super()._evict(asked._replace(**of_full))
            for at, block in np.ndindex(layers, kept):
                tokens = sources[at, block * size : (block + 1) * size]
                together = tokens[0] % size == 0 and tokens[-1] - tokens[0] == size - 1
                moved = (
                    codes[at][tokens[0] // size] if together else sealing.encoded(*(x[tokens] for x in decoded[at]), np)
                )
                self.leaves["kv"][targets[block], 0, 0, 0, at * num : (at + 1) * num] = moved
        for name, end in ends.items():
            resets = name == SCORE and self._method is not None and self._method.resets_scores
            self.leaves[name][targets[kept]] = 0 if resets else end
        return sources

    def _reads_codes(self, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
        assert self.layout.sealed is not None
        sealing = self.layout.sealed.sealing
        return (kv < sealing.exact_from(q, self.block_size, np)) & (kv >= sealing.first)

    def _bytes(self, block: np.ndarray, starts: Any, size: int) -> np.ndarray:
        """Reads bytes [..., size] of the only head of blocks [...] from some starts on."""
        return self.leaves["kv"][block[..., None], 0, 0, 0, np.asarray(starts)[..., None] + np.arange(size)]

    def _write(self, layer: int, a: StepArrays, hidden: np.ndarray) -> None:
        real = a.positions >= 0
        for (group, at), x in zip(self.layout.residual_places[layer], vectors(hidden[real]), strict=True):
            block, offset = np.divmod(a.slots[group][real], self.block_size)
            starts = (at * self.block_size + offset)[:, None] * _VECTOR + np.arange(_VECTOR)
            self.leaves["kv"][block[:, None], 0, 0, 0, starts] = x.view(np.uint8)

    def _side(self, place: tuple[int, int], block: np.ndarray) -> np.ndarray:
        """Reads exact keys or values [..., B, 8] of blocks [...]."""
        size = self.block_size * _VECTOR
        return (
            self._bytes(block, place[1] * size, size).view(np.float32).reshape(*block.shape, self.block_size, HEAD_DIM)
        )

    def _seal(self, layer: int, a: StepArrays) -> None:
        assert self.layout.sealed is not None and a.full_blocks is not None
        sealing, (group, at) = self.layout.sealed.sealing, self.layout.places[layer]
        full = a.full_blocks[group] < self.num_blocks
        for exact, _ in self.layout.residual_places[layer]:
            assert ((a.full_blocks[exact] < self.num_blocks) == full).all()
        if not full.any():
            return
        k, v = (self._side(place, a.full_blocks[place[0]][full]) for place in self.layout.residual_places[layer])
        size = sealing.head_bytes(self.block_size, HEAD_DIM)
        self.leaves["kv"][a.full_blocks[group][full], 0, 0, 0, at * size : (at + 1) * size] = sealing.encoded(k, v, np)

    def _codes(self, layer: int, kv_slots: np.ndarray) -> np.ndarray:
        """Hashes [S, P * B] of decoded keys and values."""
        assert self.layout.sealed is not None
        sealing, at = self.layout.sealed.sealing, self.layout.places[layer][1]
        block, size = kv_slots[:, :: self.block_size] // self.block_size, sealing.head_bytes(self.block_size, HEAD_DIM)
        k, v = sealing.decoded(self._bytes(block, at * size, size), self.block_size, HEAD_DIM, np)
        return digest(k, v).reshape(kv_slots.shape)

    def _exact(self, layer: int, groups: list) -> np.ndarray:
        """Hashes [S, P * B] of exact keys and values, which are at the same places of their tables."""
        (k_group, _), (v_group, _) = places = self.layout.residual_places[layer]
        assert (groups[k_group][1] == groups[v_group][1]).all()
        blocks = (groups[group][0][:, :: self.block_size] // self.block_size for group, _ in places)
        k, v = (self._side(place, block) for place, block in zip(places, blocks, strict=True))
        return digest(k, v).reshape(groups[k_group][0].shape)
