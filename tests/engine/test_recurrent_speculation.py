"""Drafts in models with recurrent layers: tokens, scores and states are those without them, bit for bit."""

import dataclasses
import functools

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.engine.sessions import _copied
from tests import machine
from tests.engine.test_states import EVERY, PROMPTS, SMALL, told
from tests.golden.cases import golden_case
from tests.guessing import ANSWERS

pytestmark = [pytest.mark.usefixtures("few_shapes"), machine.native_products, pytest.mark.cpu("invariant numerics")]
NAMES = ["qwen3_5-gated-delta-tied", "lfm2-gqa-conv-tied"]
MAMBA = pytest.param("granitemoehybrid-mamba-dense-tied", marks=pytest.mark.soak)
INVARIANT = SMALL | {"numerics": "invariant", "block_size": 16, "max_num_batched_tokens": 33}
CACHED = {"enable_prefix_caching": True, **EVERY}
GREEDY = SamplingParams(temperature=0, max_tokens=30, logprobs=0, detokenize=False)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=30, logprobs=0, detokenize=False)
TEXTS, PARAMS = PROMPTS[2:7], [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY]


def engine(name: str, **settings) -> LLM:
    return LLM(str(golden_case(name).model_dir), **INVARIANT | settings)


def drafting(name: str, **settings) -> LLM:
    """An engine whose drafts go wrong somewhere."""
    for text, (tokens, _) in zip(TEXTS, plain(name)[0], strict=True):
        ANSWERS[np.array(text, np.int32).tobytes()] = [list(tokens)]
    method = {"method": "tests.guessing:Guessing", "num_speculative_tokens": 4, "vocab_size": 128}
    return engine(
        name, speculative_config=method | {"guesses": "right at first"} | settings.pop("drafts", {}), **settings
    )


@functools.cache
def plain(name: str) -> tuple[list, list[bytes]]:
    """Answers without drafts, and the states after their last full block."""
    llm = engine(name, **CACHED)
    outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
    return [told(output) for output in outputs], states_after(llm, outputs)


def states_after(llm: LLM, outputs) -> list[bytes]:
    return [_copied(llm.engine, output).states.tobytes() for output in outputs]


@pytest.mark.parametrize("name", [*NAMES, MAMBA])
def test_drafts_change_neither_tokens_nor_scores_nor_states(name):
    expected, states = plain(name)
    llm = drafting(name, **CACHED)
    outputs = llm.generate(TEXTS, PARAMS, use_tqdm=False)
    llm.engine.scheduler.check()
    counts = llm.engine.scheduler.speculation.counts
    assert 20 < counts.num_accepted_tokens < counts.num_draft_tokens - 20
    assert [told(output) for output in outputs] == expected
    assert states_after(llm, outputs) == states and len(set(states)) == len(TEXTS)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 8, "host_cache_bytes": 2**18, "preempt": "swap"},
        {"num_blocks": 8, "enable_prefix_caching": True, "state_snapshots": {"method": "every", "num_slots": 9}},
    ],
    ids=str,
)
def test_drafts_and_preemptions_change_no_bit(settings):
    expected, _ = plain(NAMES[0])
    llm = drafting(NAMES[0], **settings)
    assert [told(output) for output in llm.generate(TEXTS, PARAMS, use_tqdm=False)] == expected
    llm.engine.scheduler.check()
    assert llm.records[-1].num_preemptions > 0 and llm.engine.scheduler.speculation.counts.num_accepted_tokens > 20


def test_completions_that_share_a_prompt_draft_apart():
    (_, *expected), _ = plain(NAMES[0])
    llm = drafting(NAMES[0])
    [output] = llm.generate([TEXTS[2]], SamplingParams(temperature=0, n=3, max_tokens=30, detokenize=False))
    assert [tuple(one.token_ids) for one in output.outputs] == [expected[1][0]] * 3


def test_states_follow_what_a_lossy_rule_accepts():
    llm = drafting(NAMES[0], drafts={"acceptance": "rejection"}, **CACHED)
    outputs = llm.generate(TEXTS[::2], dataclasses.replace(SAMPLED, temperature=0.1), use_tqdm=False)
    assert 10 < llm.engine.scheduler.speculation.counts.num_accepted_tokens
    texts = [[*text, *output.outputs[0].token_ids] for text, output in zip(TEXTS[::2], outputs, strict=True)]
    again, last = engine(NAMES[0], **CACHED), SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    assert states_after(again, again.generate(texts, last, use_tqdm=False)) == states_after(llm, outputs)
