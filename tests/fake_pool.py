"""The fake network on a pool with the arrays of a real one: codes and scales of any codec, layers in full precision,
and scores and text positions for eviction methods, whose tokens it moves.

A hash becomes a key and a value of eight numbers, which the codec rounds; what a query sees is a hash of the rounded
ones. A block that moves without its scales, or a token that stays behind, gives another text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.eviction.base import Cached, EvictionMethod
from ksana_jax.kv.layout import EXACT, HIDDEN, LOW, OF_TOKENS, SCORE, STATE, TEXT_POSITION
from ksana_jax.kv.moves import Evictions, Moves
from ksana_jax.scheduler.step.types import StepArrays, StepInput
from tests.fake_network import HEAD_DIM, mix
from tests.fakes import FakeExecutor

_ODD = np.arange(1, 2 * HEAD_DIM, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def vectors(hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [..., 8] of hashes [...]: their bytes as numbers."""
    return tuple(np.ascontiguousarray(h)[..., None].view(np.int8).astype(np.float32) for h in (hidden, mix(~hidden)))


def rounded(codec: str, x: np.ndarray) -> np.ndarray:
    """What is read of x [..., 8] after it was stored."""
    stored = find_codec(codec)
    return stored.decode(stored.encode(x, np), np).astype(np.float32)


def digest(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A hash [...] of keys and values [..., 8]."""
    both = np.concatenate([keys, values], axis=-1, dtype=np.float32)
    return mix((both.view(np.uint64) * _ODD).sum(axis=-1, dtype=np.uint64))


def mass(method: EvictionMethod, hidden: np.ndarray, keys: np.ndarray, numbers: np.ndarray | None) -> np.ndarray:
    """The attention weight of keys under queries: a whole number, so that sums have no order."""
    bits = np.uint64(0) if numbers is None else np.asarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
    weight = (mix(hidden ^ mix(keys + bits)) >> np.uint64(56)).astype(np.float32)
    return weight if numbers is None else weight * method.query_factor(numbers)


def paid(method: EvictionMethod, hidden, keys, numbers, sums: tuple[int, ...]) -> np.ndarray:
    """What queries add to the scores of keys, with the shape `sums` at the end: (X,) of several sums, else ()."""
    found = mass(method, hidden, keys, numbers)
    if not sums:
        return found
    of_heads = found.reshape(-1, 1, 1, 1, found.shape[-1]).repeat(sums[0] - method.num_scores(0), axis=2)
    return np.moveaxis(method.observed(of_heads, np), 0, -1).reshape(*found.shape, *sums)


def queries(hidden: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Queries [T, 1, G, 8], of whole numbers, that add to states of a shape [G, ...]."""
    return np.repeat(vectors(hidden)[0][:, None, None], shape[0], axis=2)


def informed(cached: Cached, method: EvictionMethod, layers: Sequence[int]) -> Cached:
    """What a method sees of one row in a group of layers, with numbers about them that are made up."""
    count = cached.keys.shape[1]
    padded = [*layers, *[0] * (count - len(layers))]
    found = {name: x[padded][None] for name, x in method.constants().items()}
    if method.reads_ropes:
        scale = np.ones((1, count, HEAD_DIM // 2), np.float32)
        found |= {"inv_freq": scale * np.linspace(1, 0.1, HEAD_DIM // 2, dtype=np.float32), "rope_scale": scale}
    norms = np.abs(cached.values).sum(axis=-1) if method.reads_outputs else None
    return cached._replace(constants=found, output_norms=norms)


def merged(method: EvictionMethod, cached: Cached, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """What a method that merges makes of one row: its keys and values [L, C, 8] and which changed, [L, C]; its state.

    Args:
      kept: [L, n] places of the tokens that stay.
    """
    stays = np.zeros(cached.keys.shape[1:2] + cached.keys.shape[3:4], bool)
    np.put_along_axis(stays, kept, True, axis=1)
    into, weights, state = method.merge(cached, stays[None, :, None], np)
    keys, values, changed = cached.keys[0, :, 0].copy(), cached.values[0, :, 0].copy(), np.zeros_like(stays)
    for at in range(len(stays)):
        for slot in kept[at]:
            others = np.flatnonzero(~stays[at] & (into[0, at, 0] == slot) & (weights[0, at, 0] > 0))
            if len(others):
                all_of = np.append(slot, others)
                factors = weights[0, at, 0, all_of][:, None] / weights[0, at, 0, all_of].sum()
                for x in (keys, values):
                    x[at, slot] = (factors * x[at, all_of]).sum(axis=0)
                changed[at, slot] = True
    return keys, values, changed, state


class StoringExecutor(FakeExecutor):
    """A `FakeExecutor` whose blocks are the bytes of `layout`, on the device and on the host.

    Attributes:
      leaves: views of the device's blocks, [M, *shape] by name.
    """

    cache = None

    def _allocate(self, host_slots: int) -> None:
        layout = self.layout
        blocks = np.zeros((self.num_blocks, layout.block_bytes), np.uint8)
        self._blocks, self.host_blocks = blocks[None], np.zeros((host_slots, 1, layout.block_bytes), np.uint8)
        self.leaves = layout.split(blocks)
        assert all(np.shares_memory(leaf, blocks) for leaf in self.leaves.values()), "views, not copies"
        self._num_exact = self.leaves[EXACT].shape[1] if EXACT in self.leaves else 0
        self._method = None if layout.eviction is None else layout.eviction.method.compiled

    @property
    def mover(self) -> StoringExecutor:
        """What reads and writes the blocks of sessions: of the pool [n, block_bytes] at ids [n]."""
        return self

    def read(self, cache: None, ids: np.ndarray) -> np.ndarray:
        return self._blocks[0, ids]

    def write(self, cache: None, ids: np.ndarray, blocks: np.ndarray) -> None:
        self._blocks[0, ids] = blocks

    def _noise(self) -> np.ndarray:
        return np.resize(np.atleast_1d(super()._noise()).view(np.uint8), self.layout.block_bytes)

    def _evicts(self, group: int) -> bool:
        return self.layout.groups[group].share is not None

    def _part(self, at: int) -> tuple[str, dict[str, np.ndarray], int]:
        """The codec of a group's layer, its leaves, and the layer's index in them."""
        if at < self._num_exact:
            return "f32", {"kv": self.leaves[EXACT]}, at
        return self.layout.codec, self.leaves, at - self._num_exact

    def _write_and_read(self, at: int, a: StepArrays, group: int, hidden, kv_slots: np.ndarray) -> np.ndarray:
        real = a.positions >= 0
        block, offset = np.divmod(a.slots[group][real], self.block_size)
        self._encode(at, vectors(hidden[real]), block, offset)
        self._enter(at, a, group, hidden)
        block, offset = np.divmod(kv_slots, self.block_size)
        with np.errstate(all="ignore"):  # there is noise in slots that nobody sees
            return digest(*self._decoded(at, lambda leaf, layer, index: leaf[block, layer, index, 0, offset]))

    def _enter(self, at: int, a: StepArrays, group: int, hidden: np.ndarray) -> None:
        """Initialises what a method needs of a step's tokens."""
        real = a.positions >= 0
        block, offset = np.divmod(a.slots[group][real], self.block_size)
        if self._evicts(group):
            for name, new in ((SCORE, 0), (TEXT_POSITION, a.positions[real]), (HIDDEN, False), (LOW, 0)):
                if name in self.leaves:
                    self.leaves[name][block, at, :, 0, offset] = np.reshape(new, (-1, 1))
            if STATE in self.leaves:
                assert self._method is not None
                leaf = self.leaves[STATE]
                leaf[block[offset == 0], at] = 0
                added = self._method.observe(queries(hidden[real], leaf.shape[4:]), a.positions[real], np)
                np.add.at(leaf, (block, at, 0), added)

    def _encode(self, at: int, pair: Sequence[np.ndarray], block: np.ndarray, offset: np.ndarray) -> None:
        """Stores keys and values [n, 8] of a group's layer."""
        codec, leaves, layer = self._part(at)
        for index, x in enumerate(pair[: self.layout.num_sides]):
            for name, part in find_codec(codec).encode(x, np).items():
                is_bits = leaves[name].dtype.kind == "u"
                leaves[name][block, layer, index, 0, offset] = part.view(leaves[name].dtype) if is_bits else part

    def _hidden(self, at: int, group: int, kv_slots: np.ndarray) -> np.ndarray:
        if HIDDEN not in self.leaves or not self._evicts(group):
            return super()._hidden(at, group, kv_slots)
        block, offset = np.divmod(kv_slots, self.block_size)
        return self.leaves[HIDDEN][block, at, 0, 0, offset]

    def _move_slots(self, sources: np.ndarray, targets: np.ndarray) -> None:
        (block, offset), (to_block, to_offset) = (np.divmod(slots, self.block_size) for slots in (sources, targets))
        for leaf in self.leaves.values():
            leaf[to_block, :, :, :, to_offset] = leaf[block, :, :, :, offset]

    def _decoded(self, at: int, get) -> list[np.ndarray]:
        codec, leaves, layer = self._part(at)
        names = find_codec(codec).arrays(HEAD_DIM)
        found = ({name: get(leaves[name], layer, index) for name in names} for index in (0, self.layout.num_sides - 1))
        return [find_codec(codec).decode(parts, np).astype(np.float32) for parts in found]

    def _observe(self, at: int, a: StepArrays, group: int, hidden, seen: tuple) -> None:
        if self._method is None or not (self._method.observes and self._evicts(group)):
            return
        keys, slots, visible = seen
        numbers = None if a.query_numbers is None else a.query_numbers[group][:, None]
        block, offset = np.divmod(slots[visible], self.block_size)
        sums = self.leaves[SCORE].shape[2:3] * (self.leaves[SCORE].shape[2] > 1)
        added = paid(self._method, hidden[:, None], keys, numbers, sums)
        added = np.broadcast_to(added, (*visible.shape, *sums))[visible].reshape(len(block), -1)
        reduction = np.maximum if self._method.score_reduction == "max" else np.add
        for nth, of_sum in enumerate(added.T):
            reduction.at(self.leaves[SCORE], (block, at, nth, 0, offset), of_sum)

    def move(self, moves: Moves) -> None:
        for nth, asked in enumerate(moves.evictions):
            self._save(moves.saves[moves.num_early[nth - 1] if nth else 0 : moves.num_early[nth]])
            assert all(x.dtype == np.int32 for x in asked[:-1]) and asked.given is None
            for row in range(len(asked.tables)):
                of_row = Evictions(*(x[row : row + 1] for x in asked[:-1]))
                (self._hide if HIDDEN in self.leaves else self._evict)(of_row)
        super().move(moves)

    @property
    def evictor(self) -> StoringExecutor:
        """What measures rows of the pool."""
        return self

    def measure(self, cache: None, asked: Evictions) -> np.ndarray:
        assert self._method is not None
        rows = (Evictions(*(x[row : row + 1] for x in asked[:-1])) for row in range(len(asked.tables)))
        with np.errstate(all="ignore"):
            return np.concatenate([self._method.measure(self._cached(row), np) for row in rows])

    def _cached(self, asked: Evictions) -> Cached:
        """What a method sees of one row in one group of layers."""
        group, [blocks], [count] = int(asked.group[0]), asked.tables, asked.num_tokens
        slots = np.arange(count)
        block, offset = blocks[slots // self.block_size], slots % self.block_size
        layers = range(len(self.layout.groups[0].layers))

        def of_tokens(leaf, layer, index):
            return leaf[block, layer, index, 0, offset]

        def stacked(name):
            if (leaf := self.leaves.get(name)) is None:
                return None
            sums = np.array([[leaf[block, n, :, 0, offset]] for n in layers])[None]
            return sums[..., 0] if leaf.shape[2] == 1 else sums

        keys, values = (np.stack(x)[None, :, None] for x in zip(*(self._decoded(n, of_tokens) for n in layers)))
        state = None
        if (leaf := self.leaves.get(STATE)) is not None:
            state = leaf[blocks[: -(-count // self.block_size)], :, 0].sum(axis=0)[None]
        numbers = asked.num_tokens, asked.num_recent, asked.length, asked.group
        more = {"num_kept": asked.num_kept, "num_sinks": asked.num_sinks, "num_prompt": asked.num_prompt}
        cached = Cached(keys, values, stacked(SCORE), stacked(TEXT_POSITION), *numbers, **more, state=state)
        assert self._method is not None
        return informed(cached, self._method, self.layout.groups[group].layers)

    def _evict(self, asked: Evictions) -> np.ndarray:
        """Moves what stays of one row in one group of layers to its first slots; returns where it was [L, kept]."""
        group, [blocks], [kept], [count] = int(asked.group[0]), asked.tables, asked.num_kept, asked.num_tokens
        assert self._method is not None and self._evicts(group) and 0 < kept < count <= len(blocks) * self.block_size
        assert asked.num_sinks[0] + asked.num_recent[0] <= kept
        slots = np.arange(count)
        block, offset = blocks[slots // self.block_size], slots % self.block_size
        to_block = asked.targets[0][slots // self.block_size]
        with np.errstate(all="ignore"):  # the last group of a kind may have fewer layers
            cached = self._cached(asked)
            if (leaf := self.leaves.get(STATE)) is not None:
                targets = asked.targets[0][: -(-kept // self.block_size)]
                leaf[targets] = 0
                leaf[targets[0], :, 0] = cached.state[0]
            priority = np.broadcast_to(self._method.priority(cached, np), cached.keys.shape[:-1])[0, :, 0]
        stays = (slots < asked.num_sinks) | (slots >= count - asked.num_recent)
        ranked = np.where(np.isnan(priority), -np.inf, priority)
        sources = np.array([np.sort(np.lexsort((-wanted, ~stays))[:kept]) for wanted in ranked])
        if self._method.merges:
            with np.errstate(all="ignore"):
                *pair, changed, state = merged(self._method, cached, sources)
            if state is not None:
                self.leaves[STATE][asked.targets[0, 0], :, 0] = state[0]
        for at, source in enumerate(sources):
            _, leaves, layer = self._part(at)
            others = (EXACT, *OF_TOKENS, STATE)
            moved = [(leaf, layer) for name, leaf in leaves.items() if name not in others]
            moved += [(leaf, at) for name, leaf in self.leaves.items() if name in OF_TOKENS]
            for leaf, index in moved:
                tokens = leaf[block[source], index, :, 0, offset[source]]
                leaf[to_block[:kept], index, :, 0, offset[:kept]] = tokens
            if self._method.merges and changed[at].any():
                new = np.flatnonzero(changed[at, source])
                self._encode(at, [x[at, source[new]] for x in pair], to_block[new], offset[new])
            if self._method.resets_scores:
                self.leaves[SCORE][to_block[:kept], at, :, 0, offset[:kept]] = 0
        return sources

    def _hide(self, asked: Evictions) -> None:
        """Hides what goes of one row in one group of layers."""
        [group], [kept], [count], [length] = asked.group, asked.num_kept, asked.num_tokens, asked.length
        assert self._method is not None and self._evicts(group) and 0 < kept < count <= length
        used = -(-length // self.block_size)
        blocks, targets = asked.tables[0, :used], asked.targets[0, :used]
        for leaf in self.leaves.values():
            leaf[targets] = leaf[blocks]
        layers = range(len(self.layout.groups[group].layers))
        block, offset = targets[np.arange(length) // self.block_size], np.arange(length) % self.block_size
        seen = np.array([np.flatnonzero(~self.leaves[HIDDEN][block, at, 0, 0, offset]) for at in layers])
        assert seen.shape == (len(layers), count), "hidden tokens are miscounted"

        def of_layer(at):
            return lambda leaf, layer, index: leaf[block[seen[at]], layer, index, 0, offset[seen[at]]]

        def stacked(name):
            if name not in self.leaves:
                return None
            return np.array([of_layer(at)(self.leaves[name], at, 0) for at in layers])[None, :, None]

        keys, values = (np.stack(x)[None, :, None] for x in zip(*(self._decoded(at, of_layer(at)) for at in layers)))
        numbers = asked.num_tokens, asked.num_recent, asked.length, asked.group
        state = None
        if (leaf := self.leaves.get(STATE)) is not None:
            state = leaf[targets, :, 0].sum(axis=0)
            leaf[targets] = 0
            leaf[targets[0], :, 0] = state
        more = {"num_kept": asked.num_kept, "num_sinks": asked.num_sinks, "num_prompt": asked.num_prompt}
        more |= {"state": None if state is None else state[None]}
        cached = Cached(keys, values, stacked(SCORE), stacked(TEXT_POSITION), *numbers, **more)
        cached = informed(cached, self._method, self.layout.groups[group].layers)
        priority = np.broadcast_to(self._method.priority(cached, np), keys.shape[:-1])[0, :, 0]
        place = np.arange(count)
        stays = (place < asked.num_sinks) | (place >= count - asked.num_recent)
        wanted, goes = np.where(np.isnan(priority), -np.inf, priority), np.zeros(priority.shape, bool)
        together = wanted.T[None] if self._method.across_layers else wanted[:, :, None]
        for of_budget, several in zip(goes.T[None] if self._method.across_layers else goes[:, :, None], together):
            order = np.lexsort((-several.ravel(), ~stays.repeat(several.shape[1])))
            of_budget[np.divmod(order[kept * several.shape[1] :], several.shape[1])] = True
        for at in layers:
            gone = seen[at][goes[at]]
            self.leaves[HIDDEN][block[gone], at, 0, 0, offset[gone]] = True
            if self._method.resets_scores:
                self.leaves[SCORE][block, at, 0, 0, offset] = 0

    def check(self, step: StepInput) -> None:
        super().check(step)
        numbers = step.arrays.query_numbers
        assert (numbers is not None) == (self.layout.numbers_queries is not None)
        if numbers is not None:
            assert numbers.shape == (len(self.layout.groups), step.shape.num_tokens) and numbers.dtype == np.float32
