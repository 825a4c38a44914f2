"""Lives of engines whose rows evict tokens from blocks of codes; and what their requests must end with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ksana_jax.core.patterns import FULL
from ksana_jax.kv.codecs.registry import find_sealing
from ksana_jax.kv.eviction import read_eviction
from tests.counted_evictions import Counted, Storage, plain
from tests.drawn_eviction import ROTATED, drawn_eviction
from tests.expected import PATTERNS, seen_later
from tests.fake_network import HEAD_DIM, attend, embed, weights_of
from tests.fake_pool import digest, paid, vectors
from tests.fake_sealed_pool import SealingExecutor
from tests.reference import literal
from tests.sealing_simulation import exactly
from tests.storing_simulation import StoringSimulation, Text


class CodedText(Text):
    """A `Text` of which old tokens are read as codes of their block, and encoded again in the blocks they move to."""

    def __init__(self, storage: Storage, num_prompt: int):
        super().__init__(storage, num_prompt)
        self.setting, sealing = dict(storage.codec), find_sealing(dict(storage.codec))
        assert sealing is not None
        self.sealing, self.size = sealing, storage.block_size
        self.exactly = np.zeros_like(self.digests)
        self.own = np.zeros((2, *self.keys.shape), np.float32)

    def add(self, token: int) -> np.ndarray:
        t, hidden = self.length, embed(token, self.length)
        self.text.append(token)
        for layer, (group, _) in enumerate(self.layout.places):
            k, v = vectors(hidden)
            self.own[:, layer, t], self.exactly[layer, t] = (k[0], v[0]), digest(k, v)[0]
            self.kept[layer].append(t)
            kept = np.array(self.kept[layer])
            if len(kept) % self.size == 0:
                self.encode(layer, kept[-self.size :], self.own[:, layer])
            at = np.arange(len(kept))
            exact_from = max(len(kept) - self.setting["residual"], 0) // self.size * self.size
            coded = (at >= self.setting["first"]) & (at < exact_from)
            seen = np.where(coded, self.digests[layer, kept], self.exactly[layer, kept])
            visible = np.ones((1, len(kept)), bool)
            if self.layout.groups[group].share is None:
                visible, _ = literal(self.patterns[layer], np.array([[t]]), kept[None])
            elif self.method is not None and self.method.observes:
                more = paid(self.method, hidden, seen, self.number(group), self.scores.shape[2:])
                largest = self.method.score_reduction == "max"
                self.scores[layer, kept] = (np.maximum if largest else np.add)(self.scores[layer, kept], more)
            hidden = attend(hidden, (seen * weights_of(at))[None], visible)
        self.length += 1
        for group, counts in enumerate(self.counts):
            if self.length in counts.evictions:
                self.evict(group, counts)
        return hidden

    def encode(self, layer: int, tokens: np.ndarray, pair: np.ndarray) -> None:
        k, v = self.sealing.decoded(self.sealing.encoded(*pair[:, tokens], np), self.size, HEAD_DIM, np)
        self.keys[layer, tokens], self.values[layer, tokens], self.digests[layer, tokens] = k, v, digest(k, v)

    def evict(self, group: int, counts: Counted) -> None:
        """The method sees the tokens of full blocks."""
        layers = self.layout.groups[group].layers
        self.open = len(self.kept[layers[0]]) % self.size
        full = len(self.kept[layers[0]]) - self.open
        before = {layer: self.kept[layer] for layer in layers}
        for layer in layers:
            self.kept[layer] = before[layer][:full]
        super().evict(group, dataclasses.replace(counts, cached=[count - self.open for count in counts.cached]))
        for layer in layers:
            read, was = np.array([self.keys[layer], self.values[layer]]), before[layer]
            blocks = [was[start : start + self.size] for start in range(0, full, self.size)]
            for start in range(0, len(self.kept[layer]), self.size):
                if (tokens := self.kept[layer][start : start + self.size]) not in blocks:
                    self.encode(layer, np.array(tokens), read)
            self.kept[layer] = self.kept[layer] + was[full:]


class EvictingCodesSimulation(StoringSimulation):
    """A `StoringSimulation` with a block codec and evictions."""

    executor, text_type = SealingExecutor, CodedText

    def draw_storage(self) -> None:
        rng = self.rng
        codec = (
            ("k", rng.choice(["kivi4", "kivi2", "kvquant3"])),
            ("v", rng.choice(["kivi4", "kivi2"])),
            ("residual", rng.choice([0, 0, 1, 3, 8])),
            ("first", rng.choice([0, 0, 1, 5])),
            ("residual_dtype", "f32"),
        )
        self.pattern = rng.choice([name for name in sorted(PATTERNS) if FULL in PATTERNS[name]])
        self.storage = Storage(self.pattern, self.block_size, codec)
        self.storage = dataclasses.replace(self.storage, eviction=self.draw_eviction())
        self.draw_room()

    def draw_eviction(self) -> tuple[tuple[str, Any], ...]:
        codec, size = dict(self.storage.codec), self.block_size
        while True:
            found = dict(drawn_eviction(self.rng, PATTERNS[self.pattern], size))
            found["interval"] = None if (found["interval"] or size) % size else found["interval"]
            found["sinks"] = max(found["sinks"], codec["first"])
            if isinstance(found["budget"], int):
                found["budget"] += found["sinks"] + self.storage.newest + 2 * size
            if codec["k"] == "kvquant3" and found["method"] not in ROTATED and "memory" not in found:
                found["positions"] = "cache"
            method = read_eviction(plain(tuple(found.items())))
            assert method is not None
            rewrites = method.merges or method.hides or method.measures or method.probes
            rotates = codec["k"] == "kvquant3" and method.positions == "absolute"
            if not rewrites and not rotates and method.state_shape(1, 2) is None:
                return tuple(found.items())

    def drawn(self) -> set[str]:
        return super().drawn() - {"codec"} | {"block codec"}

    def starts_of(self, group: int, row: int) -> list[int]:
        rows, found = self.engine.scheduler.rows, self.engine.scheduler.layout.groups[group]
        if not found.residual:
            return super().starts_of(group, row)
        done, covered = int(rows.num_computed[row]), int(rows.allocated_until[row])
        patterns = [exactly(PATTERNS[self.pattern][layer], self.storage.codec) for layer in found.layers]
        return seen_later(patterns, done, covered, self.block_size)
