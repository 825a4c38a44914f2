"""Lives of engines whose rows evict tokens and whose blocks hold codes; and what their requests must end with, computed
from each text alone, one token at a time: no blocks, no chunks, and evictions by counting."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import numpy as np

from ksana_jax.core.config import ConfigError
from ksana_jax.core.patterns import FAR, FULL
from ksana_jax.core.request import SamplingParams
from ksana_jax.kv.codecs.registry import CODECS
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.eviction.base import Cached
from ksana_jax.kv.layout import SCORE, STATE
from tests.counted_evictions import Counted, Storage, counted, divided, plain
from tests.drawn_eviction import PROMPTS, demoting, drawn_eviction
from tests.expected import LONGEST, PATTERNS, beams_by, visible_later
from tests.fake_network import HEAD_DIM, attend, choose, embed, until_stop, weights_of
from tests.fake_pool import StoringExecutor, digest, informed, merged, paid, queries, rounded, vectors
from tests.methods.selection import definition
from tests.methods.selection.definition import blocks_read
from tests.reference import literal
from tests.saving_sessions import SavingSessions

# Rotated codes of 3 and 2 bits are packed like int3's and int2's.
DRAWN = ("f32", *(name for name in CODECS if name[-1] == "4" or not name.startswith(("hadamard", "turboquant"))))


SCORES = {"quest": definition.quest, "rocketkv": functools.partial(definition.rocketkv, top_r=HEAD_DIM // 2)}


def block_queries(hidden: np.ndarray) -> np.ndarray:
    """Two queries [..., 2, 8] of hashes [...], float64 and so small that no weight of a softmax over keys is 0."""
    return np.stack([x.astype(np.float64) for x in vectors(hidden)], axis=-2) / 2**12


class Text:
    """What the layers of the fake network hold of one text."""

    def __init__(self, storage: Storage, num_prompt: int):
        self.storage, self.num_prompt, self.length = storage, num_prompt, 0
        self.text, self.is_probe, self.open = [], False, 0
        self.layout, self.patterns = storage.layout, PATTERNS[storage.pattern]
        self.method = storage.method
        layers = len(self.patterns)
        self.kept: list[list[int]] = [[] for _ in range(layers)]
        self.keys, self.values = np.zeros((2, layers, LONGEST, HEAD_DIM), np.float32)
        self.digests = np.zeros((layers, LONGEST), np.uint64)
        leaf = next((leaf.shape for leaf in self.layout.leaves if leaf.name == SCORE), (1, 1))
        self.scores = np.zeros((layers, LONGEST, *leaf[1:2] * (leaf[1] > 1)), np.float32)
        shape = next((leaf.shape[2:] for leaf in self.layout.leaves if leaf.name == STATE), None)
        self.states = None if shape is None else np.zeros((layers, *shape), np.float32)
        self.counts = [counted(storage, group, num_prompt) for group in range(len(self.layout.groups))]

    def add(self, token: int) -> np.ndarray:
        """Computes one more token; returns its hidden [1] of the last layer."""
        t, hidden = self.length, embed(token, self.length)
        self.text.append(token)
        for layer, (group, _) in enumerate(self.layout.places):
            codec = "f32" if layer in self.storage.exact else self.storage.codec
            k, v = (rounded(codec, x) for x in vectors(hidden))
            v = v if self.storage.latent is None else k
            self.keys[layer, t], self.values[layer, t], self.digests[layer, t] = k[0], v[0], digest(k, v)[0]
            self.kept[layer].append(t)
            kept = np.array(self.kept[layer])
            seen = self.digests[layer, kept]
            if self.layout.groups[group].share is None:
                visible, _ = literal(self.patterns[layer], np.array([[t]]), kept[None])
                visible = visible & self.selected(layer, hidden)
            else:
                visible = np.ones((1, len(kept)), bool)
                if self.states is not None and self.method is not None:
                    q = queries(hidden, self.states.shape[2:])
                    self.states[layer] += self.method.observe(q, np.array([t]), np)[0]
                if self.method is not None and self.method.observes:
                    more = paid(self.method, hidden, seen, self.number(group), self.scores.shape[2:])
                    before = self.scores[layer, kept]
                    largest = self.method.score_reduction == "max"
                    self.scores[layer, kept] = np.maximum(before, more) if largest else before + more
            hides = self.method is not None and self.method.hides and self.layout.groups[group].share is not None
            hidden = attend(hidden, (seen * weights_of(kept if hides else np.arange(len(kept))))[None], visible)
        self.length += 1
        if not self.is_probe and self.length == self.storage.context(self.num_prompt) < self.num_prompt:
            self.read_probe()
        if self.method is not None and self.method.measures:
            self.measure()
        for group, counts in enumerate(self.counts):
            if self.length in counts.evictions:
                self.evict(group, counts)
        return hidden

    def measure(self) -> None:
        """Divides the budget when a prompt is complete."""
        groups = [group for group, other in enumerate(self.layout.groups) if other.share is not None]
        equal = self.counts[groups[0]]
        if self.length == self.storage.context(self.num_prompt) and self.length in equal.evictions:
            assert self.method is not None and isinstance(self.method.recent, int)
            cached = (self.cached(group, self.method.recent, equal.cached[self.length]) for group in groups)
            measured = np.concatenate([self.method.measure(of_group, np)[0] for of_group in cached])
            for group, counts in zip(groups, divided(self.storage, measured, equal, self.length), strict=True):
                self.counts[group] = counts

    def read_probe(self) -> None:
        """Takes the scores that a probe would leave."""
        apart = copy.deepcopy(self, {id(x): x for x in (self.storage, self.layout, self.patterns, self.method)})
        apart.is_probe = True
        for token in self.storage.probe(np.array([*self.text, 0], np.int32)).tolist():
            apart.add(token)
        self.scores[:, : self.length] = apart.scores[:, : self.length]

    def selected(self, layer: int, hidden: np.ndarray) -> np.ndarray | bool:
        """Whether the newest token reads each one [1, T]."""
        given, t, size = dict(self.storage.selection), self.length, self.layout.block_size
        if not given or layer < given["full_layers"] or self.patterns[layer] != FULL:
            return True
        if given["prompts"] == "whole" and t < self.num_prompt:
            return True
        scores = SCORES[given["method"]]
        blocks = blocks_read(
            scores, block_queries(hidden)[0], self.keys[layer].astype(np.float64), t, size, given["budget"]
        )
        return np.isin(np.arange(t + 1) // size, list(blocks))[None]

    def number(self, group: int) -> np.ndarray | None:
        assert self.method is not None
        following = next((at for at in self.counts[group].evictions if at > self.length), FAR)
        if self.method.probes:
            following = self.length + 1 if self.is_probe else self.length + FAR
        until, outputs = np.array([[following - self.length]]), np.array([self.length + 1 - self.num_prompt])
        return None if (found := self.method.query_numbers(until, outputs)) is None else found.ravel()

    def evict(self, group: int, counts: Counted) -> None:
        method, layers, left = self.method, self.layout.groups[group].layers, counts.cached[self.length]
        assert method is not None
        kept = np.array([self.kept[layer] for layer in layers])
        count = kept.shape[1]
        recent = round(method.recent * counts.budget) if isinstance(method.recent, float) else method.recent
        recent = min(max(recent, self.storage.newest) - self.open, left - method.sinks)
        cached = self.cached(group, recent, left)
        priority = np.broadcast_to(method.priority(cached, np), (1, len(layers), 1, count))[0, :, 0]
        stay = {*range(method.sinks), *range(count - recent, count)}
        pairs = [(i, at) for i in range(count) if i not in stay for at in range(len(layers))]
        pairs.sort(key=lambda pair: (-priority[pair[1]][pair[0]], *pair))
        together = method.across_layers and method.hides
        most = (left - len(stay)) * (len(layers) if together else 1)
        for at, layer in enumerate(layers):
            mine = pairs if together else [pair for pair in pairs if pair[1] == at]
            self.kept[layer] = [t for i, t in enumerate(self.kept[layer]) if i in stay or (i, at) in mine[:most]]
            if method.resets_scores:
                self.scores[layer] = 0
        if method.merges:
            self.merge(cached, group, kept)

    def cached(self, group: int, recent: int, left: int) -> Cached:
        """What the method sees of a group of layers that keeps `left` tokens."""
        method, layers = self.method, self.layout.groups[group].layers
        assert method is not None
        kept = np.array([self.kept[layer] for layer in layers])
        own = np.array(layers)[:, None], kept
        scores = self.scores[own][None, :, None] if method.observes else None
        text = kept[None, :, None] if method.needs_text_positions else None
        numbers = (np.array([x]) for x in (kept.shape[1], recent, self.length, group))
        state = None if self.states is None else self.states[list(layers)][None]
        own_vectors = self.keys[own][None, :, None], self.values[own][None, :, None]
        more = {"num_kept": np.array([left]), "num_sinks": np.array([method.sinks]), "state": state}
        more["num_prompt"] = np.array([self.storage.context(self.num_prompt)])
        return informed(Cached(*own_vectors, scores, text, *numbers, **more), method, layers)

    def merge(self, cached: Cached, group: int, before: np.ndarray) -> None:
        """Merges what went of `before` [L, C] into what stays."""
        layers = list(self.layout.groups[group].layers)
        places = np.array([np.searchsorted(old, self.kept[layer]) for old, layer in zip(before, layers, strict=True)])
        assert self.method is not None
        *pair, changed, state = merged(self.method, cached, places)
        if state is not None and self.states is not None:
            self.states[layers] = state[0]
        for at in np.flatnonzero(changed.any(axis=1)):
            layer, new = layers[at], before[at, changed[at]]
            codec = "f32" if layer in self.storage.exact else self.storage.codec
            k, v = (rounded(codec, x[at, changed[at]]) for x in pair)
            self.keys[layer, new], self.values[layer, new], self.digests[layer, new] = k, v, digest(k, v)


@functools.lru_cache(maxsize=2**12)
def counts_of(storage: Storage, prompt: bytes) -> list[Counted]:
    """The evictions from a row with a prompt, in each group."""
    text = Text(storage, len(prompt) // 4)
    for token in np.frombuffer(prompt, np.int32).tolist():
        text.add(token)
    return text.counts


@functools.lru_cache(maxsize=2**14)
def written(
    make: type[Text], storage: Storage, prompt: bytes, count: int, seed: int | None
) -> tuple[list[int], np.ndarray]:
    """The `count` tokens that follow a prompt, and the hidden [T] of the whole text but its last token."""
    text = np.frombuffer(prompt, np.int32).tolist()
    state, num_prompt, hidden = make(storage, len(text)), len(text), []
    for t in range(num_prompt + count - 1):
        hidden.append(state.add(text[t]))
        if t >= num_prompt - 1:
            sampled = () if seed is None else ([seed], [t + 1 - num_prompt])
            text.append(int(choose(hidden[-1], 97, *sampled)[0]))
    return text[num_prompt:], np.concatenate(hidden)


# Whose vectors take twice the bytes of int4's.
WIDE = ("f32", "bf16", "f16")


class StoringSimulation(SavingSessions):
    """A `Simulation` whose pool holds codes, or whose rows evict tokens, or both."""

    executor: type[StoringExecutor] = StoringExecutor
    text_type: type[Text] = Text

    def draw_storage(self) -> None:
        rng, codec = self.rng, self.rng.choice(DRAWN)
        exact = (0,) if codec != "f32" and rng.random() < 0.5 else ()
        self.storage = Storage(self.pattern, self.block_size, codec)
        if self.draws_eviction():
            self.pattern = rng.choice([name for name in sorted(PATTERNS) if FULL in PATTERNS[name]])
            self.storage = Storage(self.pattern, self.block_size, codec, eviction=self.draw_eviction())
            if not exact and codec in WIDE:
                self.storage = dataclasses.replace(self.storage, eviction=demoting(self.storage.eviction))
            self.draw_room()
        if exact and len(self.storage.layout.groups) == 1:
            self.storage = dataclasses.replace(self.storage, exact=exact)

    def draw_room(self) -> None:
        """Draws an engine without a disk, which about holds the longest text of a prompt of so many tokens."""
        rng, self.disk = self.rng, None
        self.settings |= {"shared_rows": 0, "host_slots": rng.choice([0, 8, 50, 200])}
        most = self.storage.layout.blocks_of(LONGEST - 1, num_prompt=rng.choice([5, 10, 25, 39]))
        self.settings["num_blocks"] = max(most + rng.choice([-1, 0, 0, 0, 1, 2, 12]), 1)
        self.settings["max_num_seqs"] = rng.randint(2, 6)
        self.settings["preempt"] = rng.choice(["swap", "swap", "recompute", "auto"])

    def draws_eviction(self) -> bool:
        return self.rng.random() < 0.8

    def draw_eviction(self) -> tuple[tuple[str, Any], ...]:
        return drawn_eviction(self.rng, PATTERNS[self.pattern], self.block_size)

    def drawn(self) -> set[str]:
        found = super().drawn() | ({"codec"} if self.storage.codec != "f32" else set())
        if self.storage.exact:
            found.add("full-precision layers")
        if (method := self.storage.method) is not None:
            found.add("eviction that adds up attention" if method.adds_up else "eviction")
        return found

    def start(self) -> None:
        storage = self.storage
        self.settings |= {"stored": storage.settings, "latent": storage.latent, "make_executor": self.executor}
        super().start()
        for name in ("method", "prompts", "layers"):
            if self.storage.eviction:
                self.seen[f"engines with {dict(self.storage.eviction)[name]}"] += 1
        self.seen[f"engines with {self.storage.codec}"] += 1

    def change_pattern(self) -> None:
        """Another budget of the same method, or a refusal that changes nothing."""
        if self.storage.exact and not self.storage.eviction:
            return  # other patterns have other groups of layers, each with as many in full precision
        if not self.storage.eviction:
            super().change_pattern()
            self.storage = dataclasses.replace(self.storage, pattern=self.pattern)
            return
        if self.engine.has_work:
            return
        before, rng = self.engine.scheduler.layout, self.rng
        setting = dict(self.storage.eviction) | {
            "budget": rng.choice([0.1, 0.3, 0.7]),
            "prompts": PROMPTS.get(dict(self.storage.eviction)["method"]) or rng.choice(["whole", "once", "streamed"]),
        }
        other = dict(self.draw_eviction())
        method = read_eviction(plain(tuple(setting.items())))
        assert method is not None
        if other["method"] != setting["method"]:
            for change in (
                lambda: self.engine.set_eviction(read_eviction(plain(tuple(other.items())))),
                lambda: self.engine.set_patterns(PATTERNS["sink"]),
            ):
                try:
                    change()
                except ConfigError:
                    assert self.engine.scheduler.layout is before
                else:
                    raise AssertionError("an engine took another method, or a window")
            self.seen["changes refused"] += 1
        self.engine.set_eviction(method)
        self.storage = dataclasses.replace(self.storage, eviction=tuple(setting.items()))
        self.requests.clear()
        self.seen["changes of budget"] += 1

    def add(self) -> None:
        """Several requests at once where rows evict, since many are refused and rows take little room."""
        for _ in range(self.rng.randint(1, 3) if self.storage.eviction else 1):
            super().add()

    def disk_trouble(self) -> None:
        """Where rows evict there is no disk; they rarely fill the pool, so one is preempted without need."""
        super().disk_trouble()
        scheduler = self.engine.scheduler
        if self.storage.eviction and len(scheduler.order):
            scheduler._preempt(int(scheduler.order[-1]))

    def refusal(self, num_prompt: int, max_len: int, params: SamplingParams) -> str:
        ends = self.storage.context(num_prompt) + len(self.storage.probe(np.zeros(num_prompt, np.int32)))
        if num_prompt < LONGEST < ends and params.beam_width <= self.engine.scheduler.max_num_seqs:
            return "max_model_len"
        return super().refusal(num_prompt, max_len, params)

    def most_blocks(self, max_tokens: int, num_prompt: int) -> int:
        layout, num_context = self.engine.scheduler.layout, self.storage.context(num_prompt)
        num_probe = len(self.storage.probe(np.zeros(num_prompt, np.int32)))
        peak = -(-(num_context + num_probe) // self.block_size) * len(layout.groups) if num_probe else 0
        return max(layout.blocks_of(max_tokens, num_prompt=num_context), peak)

    def tokens_after(self, prompt: np.ndarray, count: int, seed: int | None, least: int, stop_ids) -> list[int]:
        return until_stop(written(self.text_type, self.storage, prompt.tobytes(), count, seed)[0], stop_ids, least)

    def beams_after(self, prompt: np.ndarray, width: int, penalty: float, stop_ids, count: int):
        def hidden_of(text):
            return self.hidden_of(np.concatenate([prompt, np.array(text, np.int32)]), len(prompt))

        return beams_by(hidden_of, width, penalty, stop_ids, count)

    def hidden_of(self, text: np.ndarray, num_prompt: int) -> np.ndarray:
        state = self.text_type(self.storage, num_prompt)
        return np.concatenate([state.add(int(token)) for token in text])

    def starts_of(self, group: int, row: int) -> list[int]:
        rows, scheduler = self.engine.scheduler.rows, self.engine.scheduler
        method, covered = self.storage.method, int(rows.allocated_until[row])
        if row in rows.probes:  # after which the text goes on where it was
            layers, done = scheduler.layout.groups[group].layers, self.storage.context(int(rows.num_prompt[row]))
            if scheduler.layout.groups[group].share is not None:
                return list(range(0, covered, self.block_size))
            return visible_later(self.pattern, layers, done, covered, self.block_size)
        if scheduler.layout.groups[group].share is None or method is None or method.hides:
            return super().starts_of(group, row)
        done = int(rows.num_computed[row])
        counts = counted(self.storage, group, int(rows.num_prompt[row])).cached
        if method.measures and done >= rows.num_prompt[row] and not (rows.evict_at[:, row] <= done).any():
            counts = counts_of(self.storage, rows.token_ids[row, : rows.num_prompt[row]].tobytes())[group].cached
        # A row that shares blocks evicts when the next step is scheduled.
        waits = bool((rows.evict_at[:, row] <= done).any())
        cached = counts[done - 1] + 1 if waits else counts[done]
        return list(range(0, covered - done + cached, self.block_size))
