"""Lives of engines with block codecs; and what their requests must end with, computed from each text alone."""

from __future__ import annotations

import functools

import numpy as np

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.kv.codecs.registry import find_sealing
from ksana_jax.kv.engine_layout import make_layout
from tests.expected import LONGEST, PATTERNS, beams_by, seen_later
from tests.fake_network import HEAD_DIM, attend, choose, embed, until_stop, weights_of
from tests.fake_pool import digest, vectors
from tests.fake_sealed_pool import SealingExecutor
from tests.reference import literal
from tests.saving_sessions import SavingSessions

Setting = tuple[tuple[str, object], ...]


class Text:
    """What the layers of the fake network hold of one text: exact keys and values, and codes of its full blocks."""

    def __init__(self, setting: Setting, pattern: str, size: int):
        self.patterns, self.size, self.length = PATTERNS[pattern], size, 0
        self.setting, sealing = dict(setting), find_sealing(dict(setting))
        assert sealing is not None
        self.sealing = sealing
        layers = len(self.patterns)
        self.keys, self.values = np.zeros((2, layers, LONGEST, HEAD_DIM), np.float32)
        self.exact, self.codes = np.zeros((2, layers, LONGEST), np.uint64)

    def add(self, token: int) -> np.ndarray:
        """Computes one more token; returns its hidden [1] of the last layer."""
        t, hidden = self.length, embed(token, self.length)
        positions = np.arange(t + 1)
        residual, first = self.setting["residual"], self.setting["first"]
        exact_from = max(t + 1 - residual, 0) // self.size * self.size
        coded = (positions >= first) & (positions < exact_from)
        for layer, pattern in enumerate(self.patterns):
            k, v = vectors(hidden)
            self.keys[layer, t], self.values[layer, t], self.exact[layer, t] = k[0], v[0], digest(k, v)[0]
            if (t + 1) % self.size == 0:
                self.codes[layer, t + 1 - self.size : t + 1] = self.read(layer, t + 1 - self.size)
            seen = np.where(coded, self.codes[layer, : t + 1], self.exact[layer, : t + 1])
            visible, _ = literal(pattern, np.array([[t]]), positions[None])
            hidden = attend(hidden, (seen * weights_of(positions))[None], visible)
        self.length += 1
        return hidden

    def read(self, layer: int, start: int) -> np.ndarray:
        """Hashes [B] of what is read of the block of codes that begins at a position."""
        k, v = (x[layer, start : start + self.size] for x in (self.keys, self.values))
        return digest(*self.sealing.decoded(self.sealing.encoded(k, v, np), self.size, HEAD_DIM, np))


@functools.lru_cache(maxsize=2**14)
def written(setting: Setting, pattern: str, size: int, prompt: bytes, count: int, seed: int | None) -> list[int]:
    """The `count` tokens that follow a prompt."""
    text = np.frombuffer(prompt, np.int32).tolist()
    state, num_prompt = Text(setting, pattern, size), len(text)
    for t in range(num_prompt + count - 1):
        hidden = state.add(text[t])
        if t >= num_prompt - 1:
            sampled = () if seed is None else ([seed], [t + 1 - num_prompt])
            text.append(int(choose(hidden, 97, *sampled)[0]))
    return text[num_prompt:]


class SealingSimulation(SavingSessions):
    """A `Simulation` whose pool holds codes of whole blocks, and its newest tokens exactly beside them."""

    def draw_storage(self) -> None:
        rng = self.rng
        self.setting: Setting = (
            ("k", rng.choice(["kivi4", "kivi2", "kvquant3"])),
            ("v", rng.choice(["kivi4", "kivi2"])),
            ("residual", rng.choice([0, 0, 1, 3, 8, 100])),
            ("first", rng.choice([0, 0, 1, 5])),
            ("residual_dtype", "f32"),
        )
        # With fewer spare blocks, the longest text just fits, and only alone.
        layout = make_layout(
            ModelConfig(num_layers=len(PATTERNS[self.pattern]), num_kv_heads=1, head_dim=HEAD_DIM),
            PATTERNS[self.pattern],
            EngineConfig(block_size=self.block_size, kv_cache_dtype=dict(self.setting)),
            "cpu",
        )
        self.settings["num_blocks"] = max(layout.blocks_of(LONGEST - 1) + rng.choice([-1, 0, 0, 1, 4, 200]), 1)

    def drawn(self) -> set[str]:
        return super().drawn() | {"block codec"}

    def start(self) -> None:
        self.settings |= {"stored": {"kv_cache_dtype": dict(self.setting)}, "make_executor": SealingExecutor}
        super().start()
        self.seen[f"engines with {dict(self.setting)['k']}"] += 1

    def tokens_after(self, prompt: np.ndarray, count: int, seed: int | None, least: int, stop_ids) -> list[int]:
        tokens = written(self.setting, self.pattern, self.block_size, prompt.tobytes(), count, seed)
        return until_stop(tokens, stop_ids, least)

    def beams_after(self, prompt: np.ndarray, width: int, penalty: float, stop_ids, count: int):
        def hidden_of(text):
            return self.hidden_of(np.concatenate([prompt, np.array(text, np.int32)]), len(prompt))

        return beams_by(hidden_of, width, penalty, stop_ids, count)

    def hidden_of(self, text: np.ndarray, num_prompt: int) -> np.ndarray:
        state = Text(self.setting, self.pattern, self.block_size)
        return np.concatenate([state.add(int(token)) for token in text])

    def starts_of(self, group: int, row: int) -> list[int]:
        rows, found = self.engine.scheduler.rows, self.engine.scheduler.layout.groups[group]
        if not found.residual:
            return super().starts_of(group, row)
        done, covered = int(rows.num_computed[row]), int(rows.allocated_until[row])
        patterns = [exactly(PATTERNS[self.pattern][layer], self.setting) for layer in found.layers]
        return seen_later(patterns, done, covered, self.block_size)


def exactly(pattern: AttentionPattern, of: Setting) -> AttentionPattern:
    """Which blocks of exact tokens a row keeps for a layer: those that its window and the newest tokens share."""
    setting: dict = dict(of)
    window = max(setting["residual"], 1)
    if pattern.window is not None and not (pattern.num_sinks or pattern.global_every):
        window = min(window, (pattern.window - 1) // pattern.stride * pattern.stride + 1)
    return AttentionPattern(window=window, num_sinks=setting["first"])
