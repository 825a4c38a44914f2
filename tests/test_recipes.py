"""The recipes of CONTRIBUTING, followed: toys that use only what their recipes name, served by the whole engine.

Elsewhere: a family and a kind of layer in tests/models/test_own_family.py, a task in
tests/lab/runs/test_extension.py, policies that change ranks in tests/scheduler/test_every_policy.py, a kernel
and an implementation of paged attention in tests/pallas_kernels/test_own_kernel.py.
"""

import dataclasses
import random
import re
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from ksana_jax import AttentionPattern
from ksana_jax.core import patterns
from ksana_jax.core.patterns import FAR, PatternArrays
from ksana_jax.kv import replacement
from ksana_jax.kv.visible_range import VisibleRange
from ksana_jax.scheduler import policies
from tests import expected, fake_network, reference
from tests.engine.small import VOCAB, expect_dense, make_llm, model
from tests.fakes import asking, make_engine, prompt_of, run, two_layers
from tests.random_simulations import simulate

ROOT = Path(__file__).parents[1]


def test_files_that_the_recipes_name_exist():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Adding something")[2].partition("\n## ")[0]
    named = [name for name in re.findall(r"`([\w./]+)`", section) if "/" in name or name.endswith(".py")]
    places = [ROOT / place for place in ("", "ksana_jax", "ksana_jax/models", "pallas_kernels")]
    assert len(named) > 20
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def only(registry: dict, name: str, entry):
    """Leaves a registry with one entry, so that what draws from it draws that, and restores it in its order."""
    return patch.dict(registry, {name: entry}, clear=True)


# ------------------------------------------------------------------ a scheduling policy: a function and an entry


def most_tokens_left(seq) -> float:
    """Largest bound on what is left to compute first."""
    return -seq.max_len


def test_a_scheduling_policy(monkeypatch):
    monkeypatch.setitem(policies.SCHEDULING_POLICIES, "most_tokens_left", most_tokens_left)
    engine = make_engine(policy="most_tokens_left", max_num_seqs=1)
    requests = [engine.add_request(prompt_of(5), asking(count)) for count in (2, 9, 4)]
    run(engine)
    ends = [request.metrics.finished_s for request in requests]
    assert ends[1] < ends[2] < ends[0]


# ------------------------------------------------------------------ a replacement policy: a function and an entry


def most_recent(block, age):
    """Most recently used first, the deepest of those: for texts that come around in turn and do not all fit."""
    return (-block.last_use, -block.depth)


def test_a_replacement_policy(monkeypatch):
    monkeypatch.setitem(replacement.REPLACEMENT_POLICIES, "most_recent", most_recent)

    def hit_tokens(policy: str) -> int:
        engine = make_engine(replacement=policy, caching=True, num_blocks=10, max_num_seqs=1)
        for turn in range(12):
            engine.add_request(prompt_of(13, seed=turn % 4), asking(2))
            run(engine)
        return engine.memory.counters.hit_tokens

    assert hit_tokens("lru") == 0 < hit_tokens("most_recent")


# ------------------------------------------------------------------ an attention pattern: numbers in patterns.py


class ChunkedArrays(NamedTuple):
    """`PatternArrays` with a field more, the last one, and what it hides."""

    window: Any
    num_sinks: Any
    stride: Any
    has_global: Any
    global_every: Any
    sink_position: Any
    sink_ceiling: Any
    span: Any = np.int32(FAR)

    def layer(self, index: int) -> "ChunkedArrays":
        return ChunkedArrays(*(a[index] for a in self))

    def visible(self, q_pos, kv_pos):
        return PatternArrays(*self[:-1]).visible(q_pos, kv_pos) & (q_pos // self.span == kv_pos // self.span)


@dataclasses.dataclass(frozen=True)
class Chunked(AttentionPattern):
    """`AttentionPattern` with a number more: queries see only keys of their own span of so many tokens, as in the
    chunked attention of Llama 4."""

    span: int = FAR

    def arrays(self):
        return super().arrays()._replace(span=np.int32(self.span))

    @property
    def full_until(self) -> int:
        return min(super().full_until, self.span)

    @property
    def bounded(self) -> bool:
        return self.span < FAR or super().bounded


@dataclasses.dataclass(frozen=True)
class ChunkedRange(VisibleRange):
    """`VisibleRange` with what frees blocks: all of a span goes at once, when the next one begins."""

    span: int = FAR

    def visible_from(self, next_position):
        return np.maximum(super().visible_from(next_position), next_position // self.span * self.span)


def live_range(layers) -> VisibleRange:
    """`VisibleRange.of`; here all layers have the same span, or none has one."""
    span = getattr(layers[0], "span", FAR)
    if span == FAR:
        return live_range_of(layers)
    return ChunkedRange(window=span, num_sinks=0, globals_every=(), span=span)


def literal(pattern, i, j):
    """`literal` of tests/reference.py."""
    visible, stands = literal_of(pattern, i, j)
    return visible & (i // pattern.span == j // pattern.span), stands


live_range_of, literal_of = VisibleRange.of, reference.literal


@pytest.fixture
def chunked(monkeypatch):
    """The lines of `Chunked` are in patterns.py and reference.py."""
    monkeypatch.setattr(patterns, "PatternArrays", ChunkedArrays)
    monkeypatch.setattr(VisibleRange, "of", live_range)
    for module in (reference, fake_network, expected):
        monkeypatch.setattr(module, "literal", literal)


def test_an_attention_pattern(chunked):
    config, params = model()
    text = np.random.default_rng(0).integers(2, VOCAB, 40)
    llm = make_llm(block_size=4, programs={})
    expect_dense(llm, config, params, [text, text[:9]], Chunked(span=8))
    # All that it sees at once: a span, and the chunk of 16 tokens that is computed.
    assert max(r.peak_blocks for r in llm.records) <= 2 * ((8 + 16) // 4 + 1)
    full = reference.reference_logprobs(params, config, text, Chunked())
    assert np.abs(full - reference.reference_logprobs(params, config, text, Chunked(span=8))).max() > 0.1


# ------------------------------------------------------------------ all of them


def test_random_simulations_draw_what_is_added(chunked):
    with (
        only(policies.SCHEDULING_POLICIES, "most_tokens_left", most_tokens_left),
        only(replacement.REPLACEMENT_POLICIES, "most_recent", most_recent),
        only(expected.PATTERNS, "chunked", two_layers(Chunked(span=6))),
    ):
        runs = [simulate(random.Random(seed)) for seed in range(12)]
    seen = sum((run.seen for run in runs[1:]), start=runs[0].seen)
    assert min(seen[event] for event in ("requests", "preemptions", "hit_tokens", "replaced", "swapped_in")) > 0
