"""KVzip's second pass leaves nothing but scores, and what cannot be passed again is refused."""

import dataclasses

import numpy as np
import pytest

from ksana_jax import SamplingParams
from ksana_jax.core.errors import ConfigError, ContextLengthError
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.methods.eviction.kvzip import KVzip
from tests.engine.small import VOCAB, Letters, assert_idle, make_llm
from tests.fake_pool import StoringExecutor
from tests.fakes import asking, make_engine, prompt_of, run, step

SETTING = {"method": "kvzip", "budget": 8, "interval": 1, "instruction": [7, 3, 5]}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS = [(2 + np.random.default_rng(seed).permutation(VOCAB - 2))[:30].tolist() for seed in range(3)]


def written(params=GREEDY, prompts=PROMPTS, **settings):
    llm = make_llm(
        **{"kv_eviction": SETTING, "block_size": 4, "num_blocks": 64, "max_num_batched_tokens": 64} | settings
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    assert_idle(llm)
    return outputs, llm


def tokens_of(outputs):
    return [[one.token_ids for one in output.outputs] for output in outputs]


def engine_of(**settings):
    settings = {"num_blocks": 40, "max_num_batched_tokens": 8, "max_model_len": 80, **settings}
    return make_engine(stored={"kv_eviction": SETTING}, make_executor=StoringExecutor, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5, "query_tile": 4},
        {"num_blocks": 17, "max_num_seqs": 3},
        {"max_num_seqs": 1},
        {"async_scheduling": False, "enable_prefix_caching": True},
        {"num_scheduler_steps": 4},
    ],
)
def test_chunks_a_small_pool_and_others_in_the_batch_change_no_token(settings):
    (expected, _), (found, _) = written(), written(**settings)
    assert tokens_of(found) == tokens_of(expected)


def test_a_probe_is_in_no_output_and_no_count():
    asked = dataclasses.replace(GREEDY, prompt_logprobs=0, logprobs=0)
    outputs, llm = written(asked)
    plain, _ = written(asked, kv_eviction=None)
    for output, full in zip(outputs, plain, strict=True):
        assert output.prompt_token_ids == full.prompt_token_ids
        assert len(output.prompt_logprobs) == 30 and len(output.outputs[0].token_ids) == 12
        # Before the eviction all prompt tokens see what they see without one; the last one is read after it.
        for at, (got, expected) in enumerate(zip(output.prompt_logprobs[1:], full.prompt_logprobs[1:], strict=True)):
            token = output.prompt_token_ids[at + 1]
            assert got[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)
    # Contexts of 29 tokens are computed twice, with three of the instruction.
    assert sum(r.num_tokens for r in llm.records) == 3 * (30 + 11 + 3 + 29)


def test_blocks_of_a_probe_are_returned_when_it_ends():
    engine = engine_of()
    engine.add_request(prompt_of(21), asking(4))
    held = []
    while engine.has_work:
        step(engine)
        held.append(engine.scheduler.blocks.num_used)
    # A context of 20 tokens and a probe of 23 in blocks of four; then the 8 that stay, and what follows.
    assert max(held) == 11 and held[-2] == 3


def test_a_row_preempted_in_its_probe_reads_it_again():
    expected = engine_of()
    request = expected.add_request(prompt_of(21), asking(6))
    run(expected)
    for swaps in ({}, {"host_slots": 40, "preempt": "swap"}):
        engine = engine_of(**swaps)
        again, count = engine.add_request(prompt_of(21), asking(6)), 0
        while engine.has_work:
            step(engine)
            if engine.scheduler.rows.probes and count < 2:
                count += 1
                engine.scheduler._preempt(0)
                assert not engine.scheduler.rows.probes
        assert count == 2 and again.completions[0].token_ids == request.completions[0].token_ids


def test_completions_with_a_cache_need_one_probe():
    several = dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=5)
    (expected, plain), (found, cached) = (
        written(several, PROMPTS[:1], enable_prefix_caching=on) for on in (False, True)
    )
    assert tokens_of(found) == tokens_of(expected)
    computed = [sum(r.num_tokens for r in llm.records) for llm in (plain, cached)]
    # The context of 29 tokens, and its probe of 32, are computed once and not three times.
    assert computed[0] - computed[1] == 2 * (29 + 32)


@pytest.mark.parametrize(
    ("length", "settings", "said"),
    [
        (
            30,
            {"max_model_len": 60},
            "context of 29 tokens and 32 with which kv_eviction KVzip probes it exceed max_model_len",
        ),
        (
            30,
            {"num_blocks": 15},
            "and 32 with which kv_eviction KVzip probes it need 16 KV blocks of 4 tokens, the pool has 15",
        ),
    ],
)
def test_a_context_that_cannot_be_read_twice_is_refused_with_the_numbers(length, settings, said):
    with pytest.raises(ContextLengthError, match=said):
        written(**settings)
    written(prompts=[PROMPTS[0][:9]], **settings)  # evicts nothing


def test_settings_that_do_not_suit_it_are_refused_in_a_sentence():
    for given, said in (
        ({"prompts": "whole"}, "prompts is 'whole', must be 'once'"),
        ({"instruction": 5}, "instruction is 5, must be a text or a list of token ids"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_eviction(SETTING | given)
    with pytest.raises(ConfigError, match="instruction is a text, and the engine has no tokenizer"):
        make_llm(kv_eviction={"method": "kvzip", "budget": 8})
    with pytest.raises(ConfigError, match=f"probes with token id {VOCAB}, ids go from 0 to {VOCAB - 1}"):
        make_llm(kv_eviction=SETTING | {"instruction": [VOCAB]})
    with pytest.raises(ConfigError, match="the attention of rejected draft tokens would count"):
        make_llm(kv_eviction=SETTING, speculative_config={"method": "ngram", "num_speculative_tokens": 2})


@pytest.mark.parametrize("memory", ["freed", "simulated"])
def test_questions_about_one_context_start_from_its_snapshot(memory):
    setting = SETTING | {"memory": memory}
    plain, caching = (
        make_llm(kv_eviction=setting, block_size=4, num_blocks=64, enable_prefix_caching=on) for on in (False, True)
    )
    asked = [{"prompt_token_ids": PROMPTS[0][:25], "question_token_ids": q} for q in (PROMPTS[1][:2], PROMPTS[2][:4])]
    expected = [llm_output.outputs[0].token_ids for llm_output in plain.generate(asked, GREEDY)]
    for _ in range(2):
        found = [caching.generate(one, GREEDY)[0] for one in asked]
        assert [output.outputs[0].token_ids for output in found] == expected
    assert [output.num_cached_tokens for output in found] == [25, 25]
    # One context and one probe.
    assert sum(r.num_tokens for r in caching.records) == 25 + 28 + 2 * (2 + 11 + 4 + 11)
    caching.set_kv_eviction(setting | {"instruction": [9]})
    assert caching.generate(asked[0], GREEDY)[0].num_cached_tokens == 0
    assert_idle(caching)


def test_an_instruction_is_encoded_when_an_engine_is_made_and_when_its_budget_changes():
    given, ids = (
        {"method": "kvzip", "instruction": "again, the", "interval": 1},
        tuple(Letters()._encode("again, the", False)),
    )
    llm = make_llm(kv_eviction=given, block_size=4, num_blocks=64, tokenizer=Letters())
    for budget in (0.2, 9):
        llm.set_kv_eviction(given | {"budget": budget})
        assert llm.engine.scheduler.layout.eviction.method == KVzip(instruction=ids, interval=1, budget=budget)
    around = make_llm(
        kv_eviction={"method": "adakv", "of": {name: given[name] for name in ("method", "instruction")}},
        block_size=4,
        num_blocks=64,
        tokenizer=Letters(),
    )
    assert around.engine.scheduler.layout.eviction.method.of.instruction == ids


def test_a_long_question_is_scored_once_beside_a_row_that_is_probed():
    asked = dataclasses.replace(GREEDY, prompt_logprobs=0, logprobs=0)
    llm = make_llm(kv_eviction=SETTING, block_size=4, num_blocks=64, max_num_batched_tokens=8, query_tile=4)
    prompts = [{"prompt_token_ids": ids[:-9], "question_token_ids": ids[-9:]} for ids in PROMPTS]
    alone = [llm.generate(prompt, asked)[0] for prompt in prompts]
    for one, other in zip(alone, llm.generate(prompts, asked), strict=True):
        assert len(other.prompt_logprobs) == 30 and other.outputs[0].token_ids == one.outputs[0].token_ids
        for got, expected in zip(other.prompt_logprobs[1:], one.prompt_logprobs[1:], strict=True):
            assert {i: x.logprob for i, x in got.items()} == pytest.approx(
                {i: x.logprob for i, x in expected.items()}, abs=1e-4
            )


@pytest.mark.parametrize("memory", ["freed", "simulated"])
def test_a_request_that_ends_in_its_probe_leaves_no_snapshot_of_it(memory):
    settings = {"stored": {"kv_eviction": SETTING | {"memory": memory}}, "make_executor": StoringExecutor}
    settings |= {"num_blocks": 60, "max_num_batched_tokens": 1, "max_model_len": 80}
    text, plain = prompt_of(21), make_engine(**settings)
    expected = plain.add_request(text, asking(4), num_question=6)
    run(plain)
    for num_read in (1, 5, 6, 7, 12):
        engine = make_engine(caching=True, **settings)
        first = engine.add_request(text, asking(4), num_question=6)
        rows = engine.scheduler.rows
        while not (rows.probes and rows.num_computed[0] == 15 + num_read):
            step(engine)
        engine.abort(first.request_id)
        again = engine.add_request(text, asking(4), num_question=6)
        run(engine)
        assert again.completions[0].token_ids == expected.completions[0].token_ids
