"""Engines on devices that lack loops of dynamic length and branches give the tokens of engines that have them."""

import jax
import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.devices.features import ALL_FEATURES, RBG, Features
from ksana_jax.runner import compiling
from ksana_jax.sampling.sampler import sample
from ksana_jax.sampling.vocabulary import Vocabulary
from ksana_jax.sharding import placement
from tests.engine.small import make_llm, tokens_of
from tests.loopback.operations import DYNAMIC_WHILE, operations_in
from tests.sampling.test_sampler import random_logits, settings

FEW = Features(dynamic_loops=False, branches=False)
PROMPTS = [[0, *np.random.default_rng(n).integers(2, 52, n).tolist()] for n in (3, 21, 37)]
PLAIN = {"max_tokens": 12, "ignore_eos": True, "detokenize": False}
# Sampling, one search by sorting and one by bisection.
ASKED = [
    SamplingParams(temperature=0, **PLAIN),
    SamplingParams(temperature=0.9, top_k=5, top_p=0.8, seed=1, **PLAIN),
    SamplingParams(temperature=1.5, min_p=0.01, seed=2, **PLAIN),
]
ENGINES = {
    "plain": {},
    "a block codec": {"kv_cache_dtype": "kivi4", "block_size": 8, "num_blocks": 64},
    "eviction": {"kv_eviction": {"method": "h2o", "budget": 24}, "block_size": 4, "num_blocks": 64},
}


class Operations:
    """The operations of all programs that are lowered."""

    def __init__(self):
        self.found = set()

    def lowered(self, lowered, jaxpr):
        self.found |= set(operations_in(lowered.compiler_ir("stablehlo")))

    def compiled(self, *_):
        pass


def generated(features, monkeypatch, engine, asked=ASKED):
    """Tokens, and the operations of the programs that made them."""
    monkeypatch.setattr(placement, "features", lambda device: features)
    watched = Operations()
    monkeypatch.setattr(compiling, "observers", [watched])
    llm = make_llm(programs={}, operators={"attention": "xla", "linear": "xla"}, **engine)
    return tokens_of(llm, PROMPTS[-len(asked) :], asked), watched.found


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.soak) for name in list(ENGINES)[1:])])
def test_tokens_are_the_same_without_loops_of_dynamic_length_and_branches(name, monkeypatch):
    asked = ASKED if name == "plain" else ASKED[:1]
    expected, with_all = generated(ALL_FEATURES, monkeypatch, ENGINES[name], asked)
    found, with_few = generated(FEW, monkeypatch, ENGINES[name], asked)
    assert found == expected
    assert DYNAMIC_WHILE in with_all and ("stablehlo.case" in with_all) == (name == "plain")
    assert not {DYNAMIC_WHILE, "stablehlo.case"} & with_few and "stablehlo.while" in with_few


def test_sampling_is_the_same_where_rows_are_searched_by_bisection():
    logits = random_logits(16, 2048, scale=1.0)
    rows = settings(16, top_k=np.where(np.arange(16) % 3, 0, 900), top_p=0.97, temperature=np.arange(16) % 5)
    for features in (FEW, Features(dynamic_loops=False), Features(branches=False)):
        found = jax.jit(lambda x, rows, f=features: sample(x, rows, Vocabulary(features=f)))(logits, rows)
        np.testing.assert_array_equal(found, jax.jit(sample)(logits, rows))


def test_the_devices_own_generator_keeps_a_row_apart_from_the_others(monkeypatch):
    both = Features(generator=RBG)
    together, _ = generated(both, monkeypatch, {})
    monkeypatch.setattr(placement, "features", lambda device: both)
    llm = make_llm(programs={}, operators={"attention": "xla", "linear": "xla"})
    alone = [tokens_of(llm, [prompt], [asked])[0] for prompt, asked in zip(PROMPTS, ASKED, strict=True)]
    assert alone == together
    assert alone != generated(ALL_FEATURES, monkeypatch, {})[0]
