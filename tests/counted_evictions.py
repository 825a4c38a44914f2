"""How an engine of a simulation stores keys and values, and the evictions from its rows, counted token by token."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.layer_spec import LatentSpec
from ksana_jax.core.patterns import FAR
from ksana_jax.devices.tuning import tuning
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.kv.eviction.base import EvictionMethod
from tests.expected import LONGEST, PATTERNS
from tests.fake_network import HEAD_DIM


def plain(items: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Returns `kv_eviction` from its items, in which `of` is a tuple of items too."""
    return {name: dict(value) if name == "of" else value for name, value in items}


@dataclasses.dataclass(frozen=True)
class Storage:
    """How an engine stores keys and values. eviction, selection: items of `kv_eviction` and `kv_selection`; empty
    evicts nothing, and reads all. latent: of a model whose keys are its values. codec: items of a block codec too."""

    pattern: str
    block_size: int
    codec: str | tuple[tuple[str, Any], ...] = "f32"
    exact: tuple[int, ...] = ()
    eviction: tuple[tuple[str, Any], ...] = ()
    selection: tuple[tuple[str, Any], ...] = ()
    latent: LatentSpec | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of EngineConfig."""
        codec = self.codec if isinstance(self.codec, str) else dict(self.codec)
        found: dict[str, Any] = {"kv_cache_dtype": codec, "kv_full_precision_layers": self.exact}
        found |= {"kv_eviction": plain(self.eviction)} if self.eviction else {}
        return found | ({"kv_selection": dict(self.selection)} if self.selection else {})

    @property
    def method(self) -> EvictionMethod | None:
        return read_eviction(plain(self.eviction) or None)

    @property
    def newest(self) -> int:
        """How many of the newest tokens stay next to codes."""
        return 0 if isinstance(self.codec, str) else max(dict(self.codec)["residual"], 1) + self.block_size - 2

    def context(self, num_prompt: int) -> int:
        """How many of a prompt's tokens are there when rows evict once: a token follows a probe."""
        return num_prompt - (self.method is not None and self.method.probes and num_prompt > 1)

    def probe(self, prompt: np.ndarray) -> np.ndarray:
        """What a row computes after the context of a prompt: nothing if it does not evict there."""
        end = self.context(len(prompt))
        evicts = any(end in counted(self, group, len(prompt)).evictions for group in range(len(self.layout.groups)))
        if self.method is None or not self.method.probes or not evicts:
            return np.zeros(0, np.int32)
        return self.method.probe(prompt[:end])

    @functools.cached_property
    def layout(self):
        patterns = PATTERNS[self.pattern]
        model = ModelConfig(num_layers=len(patterns), num_kv_heads=1, head_dim=HEAD_DIM, latent=self.latent)
        return make_layout(
            model, patterns, EngineConfig(block_size=self.block_size, **self.settings), tuning("cpu").stored_as_bits
        )


@dataclasses.dataclass(frozen=True)
class Counted:
    """Evictions from a row in one group of layers, counted token by token.

    cached: [LONGEST + 1] tokens that are cached after so many of the text. evictions: lengths at which some go.
    """

    cached: list[int]
    evictions: list[int]
    budget: int


@functools.lru_cache(maxsize=2**12)
def counted(storage: Storage, group: int, num_prompt: int) -> Counted:
    num_prompt = storage.context(num_prompt)
    method, share = storage.method, storage.layout.groups[group].share
    if method is None or share is None:
        return Counted(list(range(LONGEST + 1)), [], FAR)
    interval = method.interval or storage.block_size
    asked = method.budget * num_prompt if isinstance(method.budget, float) else method.budget
    shared_out = max(asked - method.sinks - interval + 1 - (method.recent if isinstance(method.recent, int) else 0), 0)
    steepest = max(other.share or 0 for other in storage.layout.groups) - 1
    if steepest > 0 and (method.once or isinstance(method.budget, float)):
        shared_out = min(shared_out, max(num_prompt - asked, 0) / steepest)
    budget = max(round(asked + (share - 1) * shared_out), method.sinks + interval + storage.newest)
    cached, evictions = [0], []
    for length in range(1, LONGEST + 1):
        count = cached[-1] + 1
        waits = length < num_prompt if method.prompts == "whole" else False
        if count > budget and not waits and not (method.once and length != num_prompt):
            evictions.append(length)
            count -= interval * math.ceil((count - budget) / interval)
        cached.append(count)
    return Counted(cached, evictions, budget)


def one_by_one(wanted: np.ndarray, mean: int, most: int) -> np.ndarray:
    """Whole numbers up to `most`, of this mean: one after the other goes to the place that lacks most."""
    found = np.zeros(len(wanted), int)
    for _ in range(len(wanted) * mean):
        found[np.where(found < most, wanted - found, -np.inf).argmax()] += 1
    return found


def divided(storage: Storage, measured: np.ndarray, equal: Counted, num_context: int) -> list[Counted]:
    """Evictions from the groups that evict, by budgets that a method has measured, [n, 1, ...]."""
    method = storage.method
    assert method is not None
    interval, left = method.interval or storage.block_size, equal.cached[num_context]
    least = min(left, method.sinks + max(int(method.recent), 1))
    wanted = (num_context - method.budgets(measured, left, num_context).ravel()) / interval
    found = []
    for count in interval * one_by_one(wanted, (num_context - left) // interval, (num_context - least) // interval):
        cached = [length - int(count) * (length >= num_context) for length in range(LONGEST + 1)]
        found.append(Counted(cached, [num_context] * int(count > 0), num_context - int(count)))
    return found
