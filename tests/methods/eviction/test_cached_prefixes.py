"""Eviction from prompts with cached beginnings: tokens equal an engine's without a prefix cache."""

import dataclasses
import functools

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.kv.eviction import EVICTION_METHODS, read_eviction
from tests.engine import small
from tests.engine.small import VOCAB, assert_idle
from tests.machine import native_products

make_llm = functools.partial(small.make_llm, block_size=4, num_blocks=64, max_num_batched_tokens=16, query_tile=8)
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
# Tokens differ: equal ones have keys of equal norm in the first layer, and rounding would choose among them.
TEXT, ONE, OTHER = (x.tolist() for x in np.split((2 + np.random.default_rng(3).permutation(VOCAB - 2))[:38], [33, 35]))


def asked(*questions):
    """One text with several questions, each read after the text is compressed; and the text alone."""
    return [{"prompt_token_ids": TEXT, "question_token_ids": list(q)} for q in questions] + [{"prompt_token_ids": TEXT}]


def answers(llm, prompts):
    """Tokens of prompts, one after another and then all at once, so that rows share blocks as they evict."""
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    return [output.outputs[0].token_ids for output in alone + llm.generate(prompts, GREEDY)]


# It also evicts generated tokens, which repeat. XLA's rounding depends on a step's shape, and would choose among them.
KNORM_STREAMED = pytest.param("knorm", "streamed", marks=native_products)


@pytest.mark.parametrize(
    ("name", "prompts"), [("knorm", "whole"), ("random", "once"), ("streaming_llm", "streamed"), KNORM_STREAMED]
)
def test_a_cached_text_is_compressed_as_if_it_had_just_been_computed(name, prompts):
    setting = {"method": name, "budget": 14, "prompts": prompts, "recent": 3}
    plain = make_llm(kv_eviction=setting)
    tiers = {"host_cache_bytes": 2**18, "cache_write": "through"} if name == "random" else {}
    caching = make_llm(kv_eviction=setting, enable_prefix_caching=True, **tiers)
    questions = asked(ONE, OTHER)
    assert answers(caching, questions) == answers(plain, questions)
    hits = [caching.engine.memory.counters.hit_tokens]
    for budget in (0.5, 9):  # what other budgets have computed is of use to these
        for llm in (plain, caching):
            llm.set_kv_eviction(setting | {"budget": budget})
        assert answers(caching, questions) == answers(plain, questions)
        hits.append(caching.engine.memory.counters.hit_tokens)
    # Of each whole prompt of 33 tokens all 8 full blocks are found from the second time on, of streamed ones the
    # blocks before the first eviction.
    found = (8 * 4, 8 * 4, 8 * 4) if prompts != "streamed" else (3 * 4, 4 * 4, 2 * 4)
    assert hits[0] == 5 * found[0]
    assert np.diff(hits).tolist() == [6 * found[1] - (prompts == "streamed") * 4, 6 * found[2]]
    assert_idle(caching)
    caching.engine.scheduler.check()


@pytest.mark.parametrize("name", EVICTION_METHODS)
def test_methods_that_add_up_attention_need_the_whole_prompt(name):
    method = read_eviction(setting := {"method": name, "budget": 0.5})
    if method is not None and method.observes:
        with pytest.raises(ConfigError, match="does not go with enable_prefix_caching: the sums of a cached block"):
            make_llm(kv_eviction=setting, enable_prefix_caching=True)


def test_blocks_of_engines_that_store_keys_otherwise_are_not_exchanged():
    digests = set()
    for eviction in (None, {"positions": "cache"}, {"positions": "absolute"}, {"positions": "absolute", "budget": 9}):
        setting = None if eviction is None else {"method": "knorm", **eviction}
        llm = make_llm(kv_eviction=setting, enable_prefix_caching=True)
        digests.add(dataclasses.astuple(llm.engine.memory.index.scope))
    assert len(digests) == 3
