"""A draft model changes no token, and drafts as the target would as far as it is like it."""

import re

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.draft_models import draft_model
from ksana_jax.engine.draft_models.proposer import DraftModelProposer
from ksana_jax.kv.model_layout import layout_of
from ksana_jax.sampling.acceptance import RULES
from ksana_jax.tokenizers.base import Piece
from tests.engine.small import SMALL, VOCAB, Letters, MoreThanRows, assert_idle, make_llm, model

PROMPTS = ["x.y", "the cat and the cat and the", "abcabcabcab", "in her hat the man in her"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.7, seed=5, repetition_penalty=1.3, max_tokens=24, ignore_eos=True, logprobs=1)


def drafting(drafter: str, count: int = 3, acceptance: str = "sampled", **settings) -> LLM:
    config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": count, "acceptance": acceptance}
    return make_llm(Letters(), speculative_config=config, **settings)


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params)
    assert_idle(llm)
    return [output.outputs[0].token_ids for output in outputs]


def counts_of(llm: LLM):
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None and not speculation.counts.num_failures
    return speculation.counts


def proposer_of(llm: LLM) -> DraftModelProposer:
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None and isinstance(speculation.proposer, DraftModelProposer)
    return speculation.proposer


@pytest.fixture(scope="module")
def plain():
    return make_llm(Letters())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("name", ["itself", "first", "other"])
def test_tokens_are_those_of_the_target_alone(plain, drafters, name, params):
    llm = drafting(drafters[name])
    assert tokens(llm, params) == tokens(plain, params)
    counts = counts_of(llm)
    assert counts.num_draft_tokens
    # The target drafts as it decodes, with its own random numbers, except for penalties that drafts do not know.
    if name == "itself" and params is not PENALISED:
        assert counts.acceptance_rate == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 4, "num_blocks": 64},
        {"num_blocks": 5, "preempt": "recompute"},
        {"num_blocks": 5, "host_cache_bytes": 1 << 20, "preempt": "swap"},
        {"enable_prefix_caching": True},
        {"kv_cache_dtype": "int8"},
    ],
    ids=lambda settings: " ".join(map(str, settings.items())),
)
def test_blocks_of_the_draft_model_go_where_those_of_the_target_go(drafters, settings):
    plain, llm = make_llm(Letters(), **settings), drafting(drafters["itself"], **settings)
    for _ in range(2):
        assert tokens(llm, GREEDY) == tokens(plain, GREEDY)
    # The target reads rounded keys and values where it stores them so; the draft model stores its own exactly.
    assert counts_of(llm).acceptance_rate == 1 or "kv_cache_dtype" in settings


def test_several_completions_of_a_prompt(plain, drafters):
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=16, ignore_eos=True)
    llm = drafting(drafters["itself"])
    got, expected = (e.generate(PROMPTS, params) for e in (llm, plain))
    assert [[c.token_ids for c in o.outputs] for o in got] == [[c.token_ids for c in o.outputs] for o in expected]
    assert counts_of(llm).acceptance_rate == 1


@pytest.mark.parametrize("acceptance", ["sampled", "rejection"])
def test_nothing_is_compiled_after_the_warm_up(drafters, acceptance):
    llm = drafting(drafters["first"], acceptance=acceptance)
    llm.warm_up(64, SAMPLED)
    proposer = proposer_of(llm)
    before = llm.runner.num_compilations, proposer.model.runner.num_compilations
    for params in (GREEDY, SAMPLED):
        tokens(llm, params)
    assert (llm.runner.num_compilations, proposer.model.runner.num_compilations) == before


def test_the_planner_counts_the_blocks_of_the_draft_model(plain, drafters):
    config, _ = model()
    alone = make_llm(Letters(), num_blocks=None, memory_bytes=48 << 10)
    llm = drafting(drafters["itself"], num_blocks=None, memory_bytes=48 << 10)
    assert llm.num_blocks == alone.num_blocks // 2 > 1  # both have as many layers
    layout = layout_of(config, dtype="f32", block_size=SMALL["block_size"])
    pool = proposer_of(llm).model.runner.cache
    assert sum(leaf.nbytes for leaf in pool.leaves.values()) == llm.num_blocks * layout.block_bytes


class Swapped(Letters):
    """A tokenizer with as many ids, two of which have swapped pieces."""

    def piece(self, token_id: int) -> Piece:
        return super().piece({5: 6, 6: 5}.get(token_id, token_id))


def test_a_vocabulary_of_as_many_other_pieces_is_refused_with_both_hashes(drafters, monkeypatch):
    monkeypatch.setattr(draft_model, "find_tokenizer", lambda path: Swapped())
    hashes = f"{draft_model.digest(Swapped(), VOCAB)} and {draft_model.digest(Letters(), VOCAB)}"
    said = f"{drafters['first']}: its vocabulary is not that of the target: their hashes are {hashes}"
    with pytest.raises(ConfigError, match=re.escape(said)):
        drafting(drafters["first"])
    for same in (Letters(), MoreThanRows()):
        monkeypatch.setattr(draft_model, "find_tokenizer", lambda path, same=same: same)
        drafting(drafters["first"])


@pytest.mark.parametrize(
    "name, settings, words",
    [
        ("larger", {}, "it has a vocabulary of 128 ids, the target one of 64"),
        ("first", {"kv_eviction": {"method": "window", "budget": 32}}, "does not go with kv_eviction: it moves tokens"),
        ("first", {"embedding_device": "host"}, 'a draft model does not go with embedding_device "host"'),
        ("nowhere", {}, "nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(drafters, name, settings, words):
    with pytest.raises(ValueError, match=words):
        drafting(drafters.get(name, name), **settings)


def test_a_model_must_be_named():
    with pytest.raises(ConfigError, match="model is '', must be the directory or name of the draft model"):
        make_llm(speculative_config={"method": "draft_model", "num_speculative_tokens": 2})


RULES_OF_DISTRIBUTIONS = pytest.mark.parametrize("acceptance", ["rejection", "block"])


@RULES_OF_DISTRIBUTIONS
def test_other_rules_are_greedy_where_rows_are_and_accept_all_of_the_target_itself(plain, drafters, acceptance):
    for name in ("first", "itself"):
        llm = drafting(drafters[name], acceptance=acceptance)
        assert tokens(llm, GREEDY) == tokens(plain, GREEDY)
        tokens(llm, SAMPLED)
        if name == "itself":
            assert counts_of(llm).acceptance_rate == 1


def pairs(llm: LLM, seeds: range) -> np.ndarray:
    """Counts of each token in second and third place after one prompt: [2, V]."""
    params = [SamplingParams(temperature=0.7, top_k=12, seed=seed, max_tokens=3, ignore_eos=True) for seed in seeds]
    outputs = [o.outputs[0].token_ids for o in llm.generate(["the cat"] * len(params), params)]
    return np.array([np.bincount([ids[at] for ids in outputs], minlength=VOCAB) for at in (1, 2)])


def chi_square(a: np.ndarray, b: np.ndarray) -> tuple[float, int]:
    """Chi-square of two samples of one size, and its number of terms; rare tokens are left out."""
    used = a + b >= 20
    return float(((a - b) ** 2 / np.maximum(a + b, 1))[used].sum()), int(used.sum())


@pytest.mark.soak
@RULES_OF_DISTRIBUTIONS
def test_texts_are_distributed_as_those_of_the_target(plain, drafters, acceptance, monkeypatch):
    expected = pairs(plain, range(3000))
    llm = drafting(drafters["other"], acceptance=acceptance)
    chi, degrees = chi_square(pairs(llm, range(3000, 6000)), expected)
    assert degrees > 20 and chi < degrees + 6 * (2 * degrees) ** 0.5  # six standard deviations
    assert 0.02 < (counts_of(llm).acceptance_rate or 0) < 0.9
    # What accepts everything is found out.
    monkeypatch.setitem(RULES, acceptance, lambda p, q, ids, counts, u, xp: (counts, p[:, -1]))
    wrong = drafting(drafters["other"], acceptance=acceptance, programs={})
    chi, degrees = chi_square(pairs(wrong, range(3000, 6000)), expected)
    assert chi > degrees + 20 * (2 * degrees) ** 0.5
