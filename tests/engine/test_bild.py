"""Big Little Decoder: with a rollback threshold of 0 it changes no token, and else exactly those that it should."""

import functools
from typing import Any

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.errors import ConfigError
from ksana_jax.engine.draft_models.bild import BildProposer
from ksana_jax.scheduler.speculative.speculation import SpeculationCounts
from tests.engine.drafters import draft_model
from tests.engine.small import Letters, assert_idle, make_llm, model
from tests.reference import reference_logprobs

PROMPTS = ["x.y", "the cat and the cat and the", "abcabcabcab", "in her hat the man in her"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
MOST = 7


def setting(drafter: str, fallback: float | None = 0.3, rollback: float | None = 0.0, **others: Any) -> dict[str, Any]:
    thresholds = {"fallback_threshold": fallback, "rollback_threshold": rollback}
    return {"method": "bild", "model": drafter, "num_speculative_tokens": MOST} | thresholds | others


@pytest.fixture(scope="module")
def bild(drafters):
    """Returns engines by draft model and settings, with the given thresholds and no counts."""

    @functools.cache
    def engine(name: str, **settings) -> LLM:
        return make_llm(Letters(), speculative_config=setting(drafters[name]), max_num_batched_tokens=32, **settings)

    def with_thresholds(name: str, fallback: float = 0.3, rollback: float = 0.0, **settings) -> LLM:
        llm = engine(name, **settings)
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None and isinstance(speculation.proposer, BildProposer)
        speculation.proposer.set_thresholds(fallback, rollback)
        speculation.counts = SpeculationCounts(np.zeros(MOST, np.int64))
        return llm

    return with_thresholds


def tokens(llm: LLM, params, prompts=PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, params)
    assert_idle(llm)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def counts_of(llm: LLM) -> SpeculationCounts:
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None and not speculation.counts.num_failures
    return speculation.counts


@pytest.fixture(scope="module")
def plain():
    return make_llm(Letters())


@pytest.mark.parametrize("name", ["itself", "near", "other"])
@pytest.mark.parametrize(
    "asked",
    [
        {"ignore_eos": True},
        {"ignore_eos": True, "frequency_penalty": 0.8},
        {"logit_bias": {7: 2.5}, "min_tokens": 9, "stop_token_ids": [7, 9, 11, 20]},
    ],
    ids=["greedy", "penalties", "bias"],
)
def test_with_a_rollback_threshold_of_zero_tokens_are_those_of_plain_decoding(plain, bild, name, asked):
    params, llm = SamplingParams(temperature=0, max_tokens=24, **asked), bild(name)
    for prompts in (PROMPTS, PROMPTS[1:2]):
        assert tokens(llm, params, prompts) == tokens(plain, params, prompts)
    assert counts_of(llm).num_draft_tokens > 20
    if name == "itself" and len(asked) == 1:
        assert counts_of(llm).acceptance_rate == 1


MEMORY = [
    {"num_blocks": 5, "preempt": "recompute"},
    {"num_blocks": 5, "host_cache_bytes": 1 << 20, "preempt": "swap"},
    {"block_size": 4, "num_blocks": 40},
]


@pytest.mark.parametrize("settings", MEMORY, ids=lambda settings: " ".join(map(str, settings.items())))
def test_preemption_prefix_hits_and_blocks_change_no_token_either(plain, bild, settings):
    llm = bild("near", 0.1, **settings)
    for _ in range(2):
        assert tokens(llm, GREEDY) == tokens(plain, GREEDY)
    assert 0.1 < (counts_of(llm).acceptance_rate or 0) < 1


@functools.cache
def logprobs_after(text: tuple[int, ...], name: str | None) -> np.ndarray:
    """Log-probabilities after a text, by a draft model or the target, in float64 and without a cache."""
    config, params = model() if name is None else draft_model(name)
    return reference_logprobs(params, config, np.array(text))[-1]


def big_little_decoding(prompt, count: int, name: str, fallback: float, rollback: float, asked: dict) -> list[int]:
    """Output of Big Little Decoder by its definition; asked: the most draft tokens after a text, where it had any."""
    text, end = tuple(prompt), len(prompt) + count
    while len(text) < end:
        draft: list[int] = []
        while len(draft) < asked.get(text, 0):
            scores = logprobs_after((*text, *draft), name)
            if np.exp(scores.max()) < fallback:
                break
            draft.append(int(scores.argmax()))
        for token in draft:
            scores = logprobs_after(text, None)
            if int(scores.argmax()) != token and -scores[token] > rollback:
                break
            text += (token,)
        text += (int(logprobs_after(text, None).argmax()),)
    return list(text[len(prompt) : end])


@pytest.fixture
def asked(monkeypatch):
    """Maximum draft tokens that a step has requested after a text: {text: most}."""
    found, propose = {}, BildProposer.propose

    def noting(self, texts, rows, most):
        for row, count in zip(rows, most, strict=True):
            found[tuple(texts.token_ids[row, : texts.lengths[row]].tolist())] = int(count)
        return propose(self, texts, rows, most)

    monkeypatch.setattr(BildProposer, "propose", noting)
    return found


@pytest.mark.parametrize(
    "name, fallback, rollback, settings",
    [("near", 0.15, 2.0, {}), ("near", 0.4, 4.0, MEMORY[0]), ("other", 0.2, 5.0, {})],
)
def test_tokens_are_those_of_the_definition(plain, bild, asked, name, fallback, rollback, settings):
    """Also where requests come and go, so that some steps have chunks of prompts and no drafts."""
    llm, prompts = bild(name, fallback, rollback, **settings), [*PROMPTS, "hat.", "yx", "a cat in the"]
    params = [SamplingParams(temperature=0, max_tokens=12 + 2 * i, ignore_eos=True) for i in range(len(prompts))]
    for output, expected, given in zip(
        llm.generate(prompts, params), tokens(plain, params, prompts), params, strict=True
    ):
        ids, prompt = output.outputs[0].token_ids, output.prompt_token_ids
        assert ids == big_little_decoding(prompt, given.max_tokens or 0, name, fallback, rollback, asked)
        assert ids != expected, "no token has come from the draft model alone"
    assert max(asked.values()) == MOST
    assert 0 < counts_of(llm).num_accepted_tokens < counts_of(llm).num_draft_tokens


def test_log_probabilities_are_those_of_the_target(bild):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    [output] = bild("near", 0.15, 4.0).generate(PROMPTS[:1], params)
    prompt, [completion] = output.prompt_token_ids, output.outputs
    config, weights = model()
    expected = reference_logprobs(weights, config, np.array(prompt + completion.token_ids))
    entries = [entry[token] for entry, token in zip(completion.logprobs or [], completion.token_ids, strict=True)]
    # float32 against float64 through two layers: about 1e-5; 1e-4 is the contract.
    at = len(prompt) - 1 + np.arange(24)
    np.testing.assert_allclose([e.logprob for e in entries], expected[at, completion.token_ids], atol=1e-4)
    assert any((e.rank or 0) > 1 for e in entries), "no token has come from the draft model alone"


def test_rows_that_sample_have_no_drafts_and_the_tokens_of_plain_decoding(plain, bild):
    llm, mixed = bild("near", 0.15, 50.0), [SAMPLED, GREEDY, SAMPLED, GREEDY]
    got, expected = (engine.generate(PROMPTS, mixed) for engine in (llm, plain))
    for one, two, params in zip(got, expected, mixed, strict=True):
        same = one.outputs[0].token_ids == two.outputs[0].token_ids
        assert (one.metrics.num_drafts == 0) == (params is SAMPLED) == same


def test_drafts_are_as_long_as_the_draft_model_is_sure(plain, bild):
    """A model that drafts for itself has all drafts accepted: the surer it must be, the fewer tokens it drafts."""
    num_tokens = []
    for fallback in (0.0, 0.2, 0.6, 1.0):
        llm = bild("itself", fallback)
        assert tokens(llm, GREEDY) == tokens(plain, GREEDY)
        counts = counts_of(llm)
        assert counts.num_accepted_tokens == counts.num_draft_tokens
        num_tokens.append(counts.num_draft_tokens)
    assert num_tokens[0] > num_tokens[1] > num_tokens[2] > num_tokens[3] == 0


def test_nothing_is_compiled_after_the_warm_up(bild):
    llm = bild("near", 0.15, 2.0)
    llm.warm_up(64, SAMPLED)
    proposer = llm.engine.scheduler.speculation.proposer
    before = llm.runner.num_compilations, proposer.model.runner.num_compilations
    for params in (GREEDY, SAMPLED, [GREEDY, SAMPLED, GREEDY, SAMPLED]):
        tokens(llm, params)
    assert (llm.runner.num_compilations, proposer.model.runner.num_compilations) == before


def test_goodput_changes_no_token_and_compiles_nothing_after_the_warm_up(plain, drafters):
    given = setting(drafters["near"], adaptive="goodput")
    llm = make_llm(Letters(), speculative_config=given, max_num_batched_tokens=32, programs={})
    llm.warm_up(64)
    before = llm.runner.num_compilations
    for _ in range(3):
        assert tokens(llm, GREEDY) == tokens(plain, GREEDY)
    assert counts_of(llm).num_drafts and llm.runner.num_compilations == before


def test_it_says_that_it_is_lossy(drafters, caplog):
    make_llm(Letters(), speculative_config=setting(drafters["near"]))
    assert not caplog.records
    make_llm(Letters(), speculative_config=setting(drafters["near"], rollback=2.0))
    assert "bild is lossy" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize(
    "given, words",
    [
        ({"fallback": None}, "fallback_threshold is None, must be a number from 0 to 1"),
        ({"rollback": None}, "rollback_threshold is None, must be a finite number from 0"),
        ({"fallback": 1.5}, "fallback_threshold is 1.5, must be a number from 0 to 1"),
        ({"rollback": -1}, "rollback_threshold is -1, must be a finite number from 0"),
        ({"acceptance": "sampled"}, "acceptance is 'sampled', must be one of bild"),
        ({"drafter": ""}, "model is '', must be the directory or name of the draft model"),
        ({"rollback": 2.0, "adaptive": "goodput"}, 'rollback_threshold is 2.0, must be 0 with adaptive "goodput"'),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_settings_that_do_not_make_sense_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        make_llm(speculative_config=setting(**{"drafter": "ksana-tiny"} | given))


def test_what_does_not_go_with_a_draft_model_does_not_go_with_it_either(drafters):
    evicting = {"kv_eviction": {"method": "window", "budget": 32}, "block_size": 4, "num_blocks": 64}
    with pytest.raises(ConfigError, match="a draft model does not go with kv_eviction"):
        make_llm(speculative_config=setting(drafters["near"]), **evicting)


def test_the_rule_is_for_this_method():
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "acceptance": "bild"}
    with pytest.raises(ConfigError, match="acceptance is 'bild', must be one of sampled, rejection, block"):
        make_llm(speculative_config=drafts)
