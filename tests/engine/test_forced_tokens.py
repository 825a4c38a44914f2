"""A given continuation is decoded as if it had been sampled: whatever the engine does, its log-probabilities are those
of the float64 model, which reads prompt and continuation at once without a cache."""

import functools

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.request import FinishReason
from tests.engine.small import EOS, VOCAB, Letters, assert_idle, make_llm, model
from tests.reference import reference_logprobs

RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(2, VOCAB, length).tolist() for length in (9, 17, 3)]
# None is what the model would choose; one has the id that ends other outputs.
FORCED = [[*RNG.integers(2, VOCAB, 6).tolist(), EOS, *RNG.integers(2, VOCAB, 9).tolist()], [5] * 11, [7, 63, 8]]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(seed=4, max_tokens=14, ignore_eos=True, detokenize=False, logprobs=2)
SMALL_POOL = {"block_size": 4, "num_blocks": 12, "max_num_seqs": 5}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 3}
BILD = {"method": "bild", "num_speculative_tokens": 3, "fallback_threshold": 0.01, "rollback_threshold": 100.0}
ENGINES = {
    "step by step": {"async_scheduling": False},
    "a step ahead": {"async_scheduling": True},
    "four steps a call": {"num_scheduler_steps": 4},
    "window": {"pattern": {"window": 6, "num_sinks": 1}},
    "prefix cache": {"enable_prefix_caching": True, "block_size": 4, "num_blocks": 64},
    "recomputed": SMALL_POOL | {"preempt": "recompute"},
    "swapped": SMALL_POOL | {"preempt": "swap", "host_cache_bytes": 2**17},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "trees": {"speculative_config": {"method": "trie", "num_speculative_tokens": 4, "decoding_mode": "hier"}},
    "draft model": {"speculative_config": DRAFTS},
    "rejection sampling": {"speculative_config": DRAFTS | {"acceptance": "rejection"}},
    "block verification": {"speculative_config": DRAFTS | {"acceptance": "block"}},
    "a lossy draft model": {"speculative_config": BILD},
}


@functools.cache
def expected(which: int, pattern=None) -> np.ndarray:
    """Log-probabilities [tokens, V] of a continuation."""
    config, params = model()
    text = PROMPTS[which] + FORCED[which]
    return reference_logprobs(params, config, text, pattern)[len(PROMPTS[which]) - 1 : -1]


def forcing(which: int, **given) -> SamplingParams:
    given = {"max_tokens": None, "logprobs": -1, "detokenize": False} | given
    return SamplingParams(forced_token_ids=FORCED[which], **given)


@pytest.mark.parametrize("name", ENGINES)
def test_log_probabilities_are_those_of_the_dense_model(name, drafters):
    settings = dict(ENGINES[name])
    if settings.get("speculative_config", {}).get("method") in ("draft_model", "bild"):
        settings["speculative_config"] = settings["speculative_config"] | {"model": drafters["near"]}
    llm = make_llm(**settings)
    prompts = [{"prompt_token_ids": ids} for ids in (*PROMPTS, *PROMPTS[:2])]
    for _ in range(2):  # the second time with what is cached
        *outputs, greedy, sampled = llm.generate(prompts, [*map(forcing, range(3)), GREEDY, SAMPLED])
        assert_idle(llm)
        for which, output in enumerate(outputs):
            [completion] = output.outputs
            assert completion.token_ids == FORCED[which] and completion.finish_reason is FinishReason.LENGTH
            wanted = expected(which, llm.patterns[0])
            # float32 against float64 through two layers: about 1e-5; 1e-4 is the contract.
            np.testing.assert_allclose(completion.distributions, wanted, atol=1e-4)
            for row, token, entry in zip(wanted, FORCED[which], completion.logprobs or [], strict=True):
                assert [*entry] == [token] and entry[token].rank == 1 + (row > row[token]).sum()
                assert entry[token].logprob == pytest.approx(row[token], abs=1e-4)
        # Rows that are not forced are as alone, but for rules that change the tokens.
        alone = make_llm(pattern=settings.get("pattern")).generate(prompts[3:], [GREEDY, SAMPLED])
        if name != "a lossy draft model":
            assert greedy.outputs[0].token_ids == alone[0].outputs[0].token_ids
            if name not in ("rejection sampling", "block verification"):
                assert sampled.outputs[0].token_ids == alone[1].outputs[0].token_ids
    scheduler = llm.engine.scheduler
    assert scheduler.num_preemptions or name not in ("recomputed", "swapped")
    assert outputs[0].num_cached_tokens or name != "prefix cache"
    assert scheduler.speculation is None or scheduler.speculation.counts.num_draft_tokens


def test_a_draft_model_drafts_the_forced_tokens(drafters):
    llm = make_llm(speculative_config=DRAFTS | {"model": drafters["other"]})
    [output] = llm.generate({"prompt_token_ids": PROMPTS[0]}, forcing(0))
    metrics = output.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 8


def test_the_output_ends_with_max_tokens_if_that_is_less():
    [output] = make_llm().generate({"prompt_token_ids": PROMPTS[0]}, forcing(0, max_tokens=4, logprobs=None))
    assert output.outputs[0].token_ids == FORCED[0][:4] and output.outputs[0].distributions is None


def test_several_completions_are_the_same():
    [output] = make_llm().generate({"prompt_token_ids": PROMPTS[0]}, forcing(0, n=3, seed=1))
    for completion in output.outputs:
        assert completion.token_ids == FORCED[0]
        np.testing.assert_allclose(completion.distributions, expected(0), atol=1e-4)


def test_text_is_that_of_the_forced_tokens():
    llm = make_llm(Letters())
    [output] = llm.generate("the cat", forcing(2, detokenize=True))
    assert output.outputs[0].text == llm.tokenizer.decode(FORCED[2])


def test_deltas_have_the_distributions_of_their_tokens():
    llm = make_llm()
    request = llm.engine.new_request(np.array(PROMPTS[0]), forcing(0), streams=True)
    found = [delta.outputs[0] for delta in llm.engine.serve([request], type(request).take_delta)]
    assert all(len(delta.token_ids) == len(delta.distributions) for delta in found if delta.token_ids)
    parts = [delta.distributions for delta in found if delta.distributions is not None]
    assert len(parts) > 2
    np.testing.assert_allclose(np.concatenate(parts), expected(0), atol=1e-4)


def test_sampled_tokens_have_distributions_too():
    [output] = make_llm().generate(
        {"prompt_token_ids": PROMPTS[1]},
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=-1, detokenize=False),
    )
    assert output.outputs[0].distributions.argmax(axis=1).tolist() == output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"forced_token_ids": []}, r"forced_token_ids is \[\], must be a list of at least one integer"),
        ({"forced_token_ids": [VOCAB]}, f"forced_token_ids has token id {VOCAB}, ids go from 0 to {VOCAB - 1}"),
        ({"forced_token_ids": [-1]}, "forced_token_ids is -1, must be an integer from 0"),
        ({"forced_token_ids": [1], "stop": "a"}, "forced_token_ids does not go with stop: the output is given"),
    ],
)
def test_what_cannot_be_forced_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        make_llm(Letters()).generate("the cat", SamplingParams(**given))


def test_distributions_that_are_too_many_are_refused(monkeypatch):
    monkeypatch.setattr("ksana_jax.engine.watched.MAX_DISTRIBUTIONS_BYTES", VOCAB * 4 * 20)
    llm = make_llm()
    llm.generate({"prompt_token_ids": PROMPTS[0]}, forcing(0))
    with pytest.raises(ValueError, match="32 distributions of 64 ids are 8,192 bytes, at most 5,120 are kept"):
        llm.generate({"prompt_token_ids": PROMPTS[0]}, forcing(0, n=2))
