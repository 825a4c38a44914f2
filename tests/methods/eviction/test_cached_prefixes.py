"""Eviction from prompts with cached beginnings: tokens equal an engine's without a prefix cache."""

import dataclasses
import functools

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.kv.eviction import EVICTION_METHODS, read_eviction
from tests.engine import small
from tests.engine.small import VOCAB, assert_idle
from tests.machine import native_products
from tests.soak import soak_unless

make_llm = functools.partial(small.make_llm, block_size=4, num_blocks=64, max_num_batched_tokens=16, query_tile=8)
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False)
# Tokens differ: equal ones have keys of equal norm in the first layer, and rounding would choose among them.
TEXT, ONE, OTHER = (x.tolist() for x in np.split((2 + np.random.default_rng(3).permutation(VOCAB - 2))[:38], [33, 35]))


def asked(*questions):
    """One text with several questions, each read after the text is compressed; and the text alone."""
    return [{"prompt_token_ids": TEXT, "question_token_ids": list(q)} for q in questions] + [{"prompt_token_ids": TEXT}]


def answers(llm, prompts, params=GREEDY):
    """Tokens of prompts, one after another and then all at once, so that rows share blocks as they evict; and the
    number of cached tokens that the latter found."""
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    before = llm.engine.memory.counters.hit_tokens
    together = llm.generate(prompts, params)
    found = llm.engine.memory.counters.hit_tokens - before
    return [[one.token_ids for one in output.outputs] for output in alone + together], found


# It also evicts generated tokens, which repeat. XLA's rounding depends on a step's shape, and would choose among them.
KNORM_STREAMED = pytest.param("knorm", "streamed", marks=native_products)
ALL = [
    ("knorm", "whole"),
    ("random", "once"),
    ("streaming_llm", "streamed"),
    ("h2o", "streamed"),
    ("d2o", "streamed"),
    ("mikv", "streamed"),
    ("vatp", "whole"),
    ("keyformer", "whole"),
    ("snapkv", "once"),
    ("chunkkv", "whole"),
    ("rkv", "streamed"),
    ("tova", "streamed"),
    ("keydiff", "once"),
    ("lagkv", "whole"),
    ("expected_attention", "streamed"),
    ("criticalkv", "once"),
]
OWN = {"vatp": {"budget": 24}, "lagkv": {"sinks": 2, "lag_size": 4}}
EVERY_TIME = (("knorm", "whole"), ("h2o", "streamed"), ("d2o", "streamed"), ("mikv", "streamed"), ("snapkv", "once"))
CASES = [KNORM_STREAMED, *soak_unless(EVERY_TIME.__contains__, ALL)]


@pytest.mark.parametrize(("name", "prompts"), CASES)
def test_a_cached_text_is_compressed_as_if_it_had_just_been_computed(name, prompts):
    setting = {"method": name, "budget": 14, "prompts": prompts, "recent": 3} | OWN.get(name, {})
    plain = make_llm(kv_eviction=setting)
    tiers = {"host_cache_bytes": 2**18, "cache_write": "through"} if name in ("random", "h2o") else {}
    caching = make_llm(kv_eviction=setting, enable_prefix_caching=True, **tiers)
    questions = asked(ONE, OTHER)
    # The 33 tokens before a question are found, and all but the last one of a prompt without a question.
    assert answers(caching, questions) == (answers(plain, questions)[0], 33 + 33 + 32)
    for budget in (0.8, 25):  # what other budgets have left is of no use to these
        for llm in (plain, caching):
            llm.set_kv_eviction(setting | {"budget": budget})
        assert answers(caching, questions) == (answers(plain, questions)[0], 33 + 33 + 32)
    assert_idle(caching)
    caching.engine.scheduler.check()


@pytest.mark.parametrize("name", ["h2o", "d2o", "keyformer"])
def test_a_second_turn_and_a_branch_of_it_start_from_what_the_first_one_left(name):
    setting = {"method": name, "budget": 14, "prompts": "streamed", "recent": 3}
    plain, caching = (make_llm(kv_eviction=setting, enable_prefix_caching=on) for on in (False, True))
    ids = caching.generate({"prompt_token_ids": TEXT}, GREEDY)[0].outputs[0].token_ids
    turns = [{"prompt_token_ids": TEXT + list(ids) + list(more)} for more in (ONE, OTHER)]
    expected = [llm_output.outputs[0].token_ids for llm_output in plain.generate(turns, GREEDY)]
    for turn, tokens in zip(turns, expected, strict=True):
        [output] = caching.generate(turn, GREEDY)
        assert output.outputs[0].token_ids == tokens
        # The last token of an answer is never computed. Keyformer tells a prompt's tokens from those of an answer.
        assert output.num_cached_tokens == (len(TEXT) - 1 if name == "keyformer" else len(TEXT) + len(ids) - 1)


def test_a_snapshot_holds_the_token_that_a_step_ahead_computed():
    """Its attention is in the sums, though the text had ended."""
    setting = {"method": "h2o", "budget": 16, "prompts": "streamed", "recent": 3}
    ahead, plain = make_llm(kv_eviction=setting, enable_prefix_caching=True), make_llm(kv_eviction=setting)
    assert ahead.config.async_scheduling
    ids = plain.generate({"prompt_token_ids": TEXT}, GREEDY)[0].outputs[0].token_ids
    stop = dataclasses.replace(GREEDY, stop_token_ids=[ids[5]], max_tokens=20)
    [output] = ahead.generate({"prompt_token_ids": TEXT}, stop)
    turn = {"prompt_token_ids": TEXT + list(output.outputs[0].token_ids) + OTHER}
    [expected], [output] = (llm.generate(turn, GREEDY) for llm in (plain, ahead))
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.num_cached_tokens == len(turn["prompt_token_ids"]) - len(OTHER)


@pytest.mark.parametrize(("name", "prompts"), [("window", "once"), ("snapkv", "streamed")])
def test_completions_of_one_prompt_start_from_one_snapshot(name, prompts):
    setting, several = {"method": name, "budget": 14, "prompts": prompts, "recent": 3}, {"n": 3, "temperature": 1.0}
    params = dataclasses.replace(GREEDY, seed=5, **several)
    plain, caching = (make_llm(kv_eviction=setting, enable_prefix_caching=on) for on in (False, True))
    expected, found = answers(plain, asked(ONE), params)
    assert len({tuple(tokens) for tokens in expected[0]}) == 3 and found == 0
    assert answers(caching, asked(ONE), params) == (expected, 3 * (33 + 32))


@pytest.mark.parametrize(("name", "caching"), [("window", False), ("h2o", True)])
def test_one_of_several_beams_is_as_good_as_alone(name, caching):
    """A score is that of the beam's tokens when they are read as one prompt that is evicted from token by token."""
    setting = {"method": name, "budget": 14, "prompts": "streamed", "recent": 3}
    llm = make_llm(kv_eviction=setting, enable_prefix_caching=caching)
    beams = SamplingParams(beam_width=3, n=3, max_tokens=9, ignore_eos=True, detokenize=False)
    [found] = llm.generate({"prompt_token_ids": TEXT}, beams)
    for beam in found.outputs:
        text, scored = TEXT + list(beam.token_ids), dataclasses.replace(GREEDY, prompt_logprobs=0, max_tokens=1)
        [read] = llm.generate({"prompt_token_ids": text}, scored)
        logprobs = [read.prompt_logprobs[at][text[at]].logprob for at in range(len(TEXT), len(text))]
        assert beam.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-4)
    assert_idle(llm)


@pytest.mark.parametrize("name", ["window", "h2o"])
def test_a_row_takes_over_the_blocks_of_its_snapshot_where_no_room_is_left_for_copies(name):
    setting = {"method": name, "budget": 14, "prompts": "streamed", "recent": 3}
    plain = make_llm(kv_eviction=setting)
    tight = make_llm(kv_eviction=setting, enable_prefix_caching=True, num_blocks=4)
    text, few = TEXT, dataclasses.replace(GREEDY, max_tokens=5)
    for turn in range(3):
        [expected], [output] = (llm.generate({"prompt_token_ids": text}, few) for llm in (plain, tight))
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.num_cached_tokens == (len(text) - 3 if turn else 0)
        text = text + list(output.outputs[0].token_ids) + ONE
    tight.engine.scheduler.check()


def test_two_methods_tell_outputs_from_a_prompt():
    counts = {name for name in EVICTION_METHODS if read_eviction({"method": name}).counts_outputs}
    assert counts == {"keyformer", "prefill_decode"}


def test_blocks_of_engines_that_store_keys_otherwise_are_not_exchanged():
    digests = set()
    for eviction in (None, {"positions": "cache"}, {"positions": "absolute"}, {"positions": "absolute", "budget": 9}):
        setting = None if eviction is None else {"method": "knorm", **eviction}
        llm = make_llm(kv_eviction=setting, enable_prefix_caching=True)
        digests.add(dataclasses.astuple(llm.engine.memory.index.scope))
    assert len(digests) == 3
