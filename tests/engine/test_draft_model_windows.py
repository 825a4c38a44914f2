"""A draft model under windows: its keys and values are those that the target's own would be, so if it is the target
itself, all of its drafts are accepted; and it changes no token whatever it is."""

from typing import Any

import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.engine.draft_models.proposer import DraftModelProposer
from tests.engine.small import Letters, assert_idle, make_llm

# Up to ten windows long, and computed in chunks of up to two.
PROMPTS = [
    "the cat and the man in her hat and the cat in",
    "abcabcabcabcabcabcabcabcabcabc",
    "x.y",
    "the cat and the man",
]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=14, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 64,
    "max_num_batched_tokens": 32,
    "max_repositioned_sinks": 3,
}
PATTERNS = {
    "window": {"window": 8},
    "window of a block": {"window": 4},
    "sinks": {"window": 6, "num_sinks": 3},
    "dilated": {"window": 9, "stride": 2},
    "global": {"window": 5, "global_every": 7},
}


def pair(drafter: str, pattern: Any, count: int = 7, **settings) -> tuple[LLM, LLM]:
    """Returns an engine without speculation and one with it."""
    config = {"method": "draft_model", "model": drafter, "num_speculative_tokens": count}
    settings = {**SETTINGS, "pattern": pattern, **settings}
    return make_llm(Letters(), **settings), make_llm(Letters(), speculative_config=config, **settings)


def outputs_of(llm: LLM, params: SamplingParams, prompts=PROMPTS) -> list[list[int]]:
    found = llm.generate(prompts, params)
    assert_idle(llm)
    return [completion.token_ids for output in found for completion in output.outputs]


def acceptance_rate(llm: LLM) -> float:
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None and not speculation.counts.num_failures
    assert speculation.counts.num_draft_tokens > 30
    return speculation.counts.acceptance_rate or 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_drafts_of_the_target_itself_are_accepted(drafters, pattern):
    plain, llm = pair(drafters["itself"], PATTERNS[pattern])
    for params in (GREEDY, SAMPLED):
        assert outputs_of(llm, params) == outputs_of(plain, params)
    assert acceptance_rate(llm) == 1


def test_drafts_are_rejected_if_the_draft_model_does_not_keep_up(drafters, monkeypatch):
    """It then reads the rest of a prompt whose beginning it has not seen: worse guesses, and the same tokens."""
    monkeypatch.setattr(DraftModelProposer, "keep_up", lambda *given: None)
    plain, llm = pair(drafters["itself"], PATTERNS["window"])
    assert outputs_of(llm, GREEDY) == outputs_of(plain, GREEDY)
    assert 0.2 < acceptance_rate(llm) < 0.98


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": True},
        {"max_num_batched_tokens": 16, "count": 3},
    ],
    ids=lambda settings: " ".join(map(str, settings.items())),
)
@pytest.mark.parametrize("pattern", ["window", "sinks"])
def test_keys_follow_the_blocks(drafters, pattern, settings):
    plain, llm = pair(drafters["itself"], PATTERNS[pattern], **settings)
    for _ in range(2):
        assert outputs_of(llm, GREEDY) == outputs_of(plain, GREEDY)
    assert acceptance_rate(llm) == 1


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_preempted_rows_go_on(drafters, preempt):
    """Blocks that come back from the host are others, and not all of their content can be read again."""
    settings = {"num_blocks": 12, "preempt": preempt, "host_cache_bytes": 1 << 20 if preempt == "swap" else 0}
    plain, llm = pair(drafters["itself"], {"window": 16}, **settings)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = ["the man in her", "x", "b", "a"]
    assert outputs_of(llm, params, prompts) == outputs_of(plain, params, prompts)
    assert llm.engine.scheduler.num_preemptions
    assert acceptance_rate(llm) == 1 if preempt == "recompute" else acceptance_rate(llm) > 0.5


@pytest.mark.parametrize(
    "pattern",
    [[{"window": 6}, {}], [{"window": 8, "num_sinks": 2}, {"window": 5, "global_every": 7}]],
    ids=["one layer sees everything", "windows"],
)
@pytest.mark.parametrize("name", ["itself", "first"])
def test_layers_of_the_target_may_differ(drafters, pattern, name):
    plain, llm = pair(drafters[name], pattern)
    for params in (GREEDY, SAMPLED):
        assert outputs_of(llm, params) == outputs_of(plain, params)
    acceptance_rate(llm)


def test_the_pattern_may_change(drafters):
    plain, llm = pair(drafters["itself"], PATTERNS["window"])
    for pattern in ({"window": 4}, None, {"window": 8}):
        for engine in (plain, llm):
            engine.set_pattern(pattern)
        assert outputs_of(llm, GREEDY) == outputs_of(plain, GREEDY)
        assert acceptance_rate(llm) == 1


def test_several_completions_share_a_prompt(drafters):
    params = SamplingParams(temperature=1.0, seed=7, n=3, max_tokens=14, ignore_eos=True)
    plain, llm = pair(drafters["itself"], PATTERNS["sinks"])
    assert outputs_of(llm, params) == outputs_of(plain, params)
    assert acceptance_rate(llm) > 0.8


def test_big_little_decoding_has_windows_too(drafters):
    thresholds = {"fallback_threshold": 0.1, "rollback_threshold": 0.0}
    config = {"method": "bild", "model": drafters["itself"], "num_speculative_tokens": 7, **thresholds}
    settings = {**SETTINGS, "pattern": PATTERNS["sinks"]}
    plain, llm = make_llm(Letters(), **settings), make_llm(Letters(), speculative_config=config, **settings)
    assert outputs_of(llm, GREEDY) == outputs_of(plain, GREEDY)
    assert acceptance_rate(llm) == 1
