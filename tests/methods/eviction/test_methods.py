"""Every eviction method in the engine against its dense float64 definition: after every step the same tokens are kept
in every layer and kv head, and log-probabilities are the same; ragged, chunked, preempted."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from ksana_jax import AttentionPattern, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.oracle import foreseen
from tests.engine import small
from tests.engine.small import VOCAB, assert_idle, model
from tests.methods.eviction.defined import METHODS
from tests.methods.eviction.reference import Rule, run
from tests.soak import soak_unless

# The pool is read between steps, when none may be under way.
make_llm = functools.partial(small.make_llm, async_scheduling=False)

SIZE = 4
RNG = np.random.default_rng(5)
# Tokens of a prompt differ: equal ones have keys of equal norm in the first layer.
PROMPTS = [(2 + RNG.permutation(VOCAB - 2)[:length]).tolist() for length in (30, 13, 9)]


EVERY_TIME = ("h2o", "kvzip", "h2o, once, half of a prompt", "h2o, pyramid", "h2o, positions in the cache")
EVERY_TIME += ("snapkv", "d2o", "cake", "mikv")


def serve(llm, num_outputs: int, preempts: bool, num_question: int):
    """Runs the prompts to their end; returns their outputs, and [(request, tokens computed, the pool's content)]."""
    asked = SamplingParams(
        temperature=0, max_tokens=num_outputs, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
    )
    requests = [llm.engine.add_request(np.array(prompt), asked, num_question=num_question) for prompt in PROMPTS]
    scheduler, seen, number = llm.engine.scheduler, [], 0
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.make_moves()
        pool = llm.runner.cache
        for row in scheduler.order.tolist():
            rows = scheduler.rows
            if row in rows.probes or (rows.num_computed[row] >= rows.evict_at[:, row]).any():
                continue
            state = {name: getattr(rows, name)[..., row].copy() for name in ("num_computed", "num_evicted")}
            kv = [pool.leaves[name] for name in ("exact", "kv") if name in pool.leaves]
            kv = np.concatenate(kv, axis=1)
            seen.append((rows.seqs[row].request_id, state, rows.block_tables[:, row].copy(), kv))
        scheduler.check()
        number += 1
        if preempts and number in (5, 11, 17, 23) and len(scheduler.order):
            scheduler._preempt(int(scheduler.order[-1]))
    assert_idle(llm)
    return [request.output() for request in requests], seen


def compare(llm, rule_of, num_outputs: int = 20, preempts: bool = False, num_question: int = 0) -> None:
    (config, params), (outputs, seen) = model(), serve(llm, num_outputs, preempts, num_question)
    places, size, most = llm.runner.layout.places, llm.config.block_size, 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        text = np.array(prompt + output.outputs[0].token_ids)
        num_context = len(prompt) - num_question
        expected, kept, states = run(params, config, text, rule_of(num_context), num_context)
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        got = [entry[int(token)].logprob for entry, token in zip(entries, text[1:], strict=True)]
        # float32 against float64 through two layers: about 1e-5; 1e-4 is the contract.
        np.testing.assert_allclose(got, expected[np.arange(len(text) - 1), text[1:]], atol=1e-4)
        assert output.outputs[0].token_ids == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        for request, state, tables, pool in seen:
            if request != output.request_id:
                continue
            length = int(state["num_computed"])
            for layer, (group, at) in enumerate(places):
                slots = np.arange(length - int(state["num_evicted"][group]))
                most = max(most, length - len(slots))
                stored = pool[tables[group][slots // size], at, 1, :, slots % size]  # [slots, K, H]
                for number, head in enumerate(states[layer]):
                    positions = kept[length - 1][layer][number]
                    assert len(positions) == len(slots)
                    whole = [i for i, j in enumerate(positions) if j is not None]
                    wanted = np.array([head.past[length - 1][positions[i]] for i in whole])
                    np.testing.assert_allclose(stored[whole, number], wanted, atol=1e-4, err_msg=f"{length} {layer}")
    assert most > 10


@pytest.mark.parametrize("name", soak_unless(EVERY_TIME.__contains__, METHODS))
def test_a_method_keeps_what_its_definition_keeps(name):
    setting, rule_of = METHODS[name]
    llm = make_llm(kv_eviction=setting, block_size=SIZE, num_blocks=64, max_num_batched_tokens=16, query_tile=8)
    # Generated tokens repeat, and their keys in the first layer tie: rounding decides which KNorm drops as it goes on.
    # KVzip evicts before the last token of a prompt.
    compare(llm, rule_of, num_outputs=1 if name == "knorm" else 20, num_question=int(name.startswith("kvzip")))


@pytest.mark.parametrize("name", ["h2o", "h2o, positions in the cache", "snapkv", "tova, once"])
def test_forced_tokens_are_decoded_from_what_the_definition_keeps(name):
    setting, rule_of = METHODS[name]
    llm = make_llm(kv_eviction=setting, block_size=SIZE, num_blocks=64, max_num_batched_tokens=16, query_tile=8)
    prompt, forced = PROMPTS[0], PROMPTS[1] + PROMPTS[2]
    asked = SamplingParams(forced_token_ids=forced, max_tokens=None, logprobs=-1, detokenize=False)
    [output] = llm.generate({"prompt_token_ids": prompt}, asked)
    config, params = model()
    expected, _, _ = run(params, config, np.array(prompt + forced), rule_of(len(prompt)), len(prompt))
    np.testing.assert_allclose(output.outputs[0].distributions, expected[len(prompt) - 1 : -1], atol=1e-4)


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize(
    "name",
    soak_unless(
        ("h2o, once, half of a prompt", "kvzip", "snapkv").__contains__,
        [
            "h2o",
            "h2o, once, half of a prompt",
            "h2o, pyramid",
            "kvzip",
            "kvzip, pyramid",
            "snapkv",
            "pyramidkv",
            "tova, once",
            "knorm, once, pyramid",
            "vatp",
        ],
    ),
)
def test_a_question_is_read_after_what_comes_before_it_was_compressed(name, preempts):
    setting, rule_of = METHODS[name]
    llm = make_llm(kv_eviction=setting, block_size=SIZE, num_blocks=64, max_num_batched_tokens=16, query_tile=8)
    compare(llm, rule_of, preempts=preempts, num_question=5)


def test_one_beam_reads_a_question_after_the_compression_as_greedy_decoding_does():
    setting, prompt = {"method": "window", "budget": 8, "interval": 1, "prompts": "once"}, PROMPTS[0]
    llm = make_llm(kv_eviction=setting, block_size=SIZE, num_blocks=64, max_num_batched_tokens=16, query_tile=8)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    together, apart = {"prompt_token_ids": prompt}, {"prompt_token_ids": prompt[:-9], "question_token_ids": prompt[-9:]}
    found = [
        llm.generate(asked, params)[0].outputs[0].token_ids
        for params in (greedy, dataclasses.replace(greedy, beam_width=1))
        for asked in (apart, together)
    ]
    assert found[:2] == found[2:] and found[0] != found[1]


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
@pytest.mark.parametrize(
    "name", soak_unless(lambda name: name == "h2o", ["h2o", "h2o, positions in the cache", "d2o", "mikv", "snapkv"])
)
def test_a_preempted_text_keeps_what_it_would_have_kept(name, preempt):
    setting, rule_of = METHODS[name]
    swaps = {"host_cache_bytes": 2**17, "preempt": "swap"} if preempt == "swap" else {}
    llm = make_llm(
        kv_eviction=setting, block_size=SIZE, num_blocks=64, max_num_batched_tokens=16, query_tile=8, **swaps
    )
    compare(llm, rule_of, preempts=True)
    assert llm.engine.scheduler.num_preemptions > 2
    assert bool(llm.engine.memory.counters.swapped_in) == bool(swaps)


@pytest.mark.parametrize("name", ["vatp", "d2o"])
def test_a_method_keeps_the_same_with_layers_in_full_precision_beside_others(name):
    """In float32 both kinds of layers are exact, in separate leaves; the second layer comes first."""
    setting, rule_of = METHODS[name]
    llm = make_llm(
        kv_eviction=setting,
        kv_cache_dtype="f32",
        kv_full_precision_layers=(1,),
        block_size=SIZE,
        num_blocks=64,
        max_num_batched_tokens=16,
        query_tile=8,
    )
    assert {"kv", "exact", "score"} <= llm.runner.cache.leaves.keys()
    compare(llm, rule_of)


@pytest.mark.soak
@pytest.mark.parametrize("chunk, block_size", [(1, 4), (7, 4), (64, 8), (5, 1)])
@pytest.mark.parametrize("name", ["h2o", "snapkv, streamed", "keyformer", "d2o"])
def test_chunks_and_blocks_make_no_difference(name, chunk, block_size):
    setting, rule_of = METHODS[name]
    setting = {"interval": 4} | setting
    llm = make_llm(
        kv_eviction=setting, block_size=block_size, num_blocks=256, max_num_batched_tokens=chunk, query_tile=8
    )
    compare(llm, rule_of)


ORACLE = {"method": "oracle", "budget": 10, "recent": 3, "sinks": 1, "interval": 2, "prompts": "streamed"}


def test_the_oracle_keeps_what_later_queries_attend_to():
    config, params = model()
    llm = make_llm(kv_eviction=ORACLE, block_size=SIZE, num_blocks=64, max_num_batched_tokens=16, query_tile=8)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    for text in PROMPTS[:2]:
        everything = Rule("sums", [64, 64], 1, recents=[64] * 2)
        _, _, states = run(params, config, text[:-1], everything, len(text))

        def received(layer, head, position, length, states=states):
            return sum(weights.get(position, 0.0) for weights in states[layer][head].newest[length:])

        rule = Rule("future", [10, 10], 2, recents=[3] * 2, sinks=1, whole=False, future=received)
        expected, kept, _ = run(params, config, text, rule, len(text))
        with foreseen(llm, text):
            known = llm.engine.scheduler.layout.eviction.method.given(0, np.arange(len(text)))
            [output] = llm.generate({"prompt_token_ids": text}, asked)
        for layer, head, length in itertools.product(range(2), range(2), (0, 7, len(text) - 2)):
            sums = [received(layer, head, position, length) for position in range(len(text))]
            np.testing.assert_allclose(known[length, layer, head], sums, atol=1e-4)
        got = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]
        np.testing.assert_allclose(got, expected[np.arange(len(text) - 1), text[1:]], atol=1e-4)
        assert len(kept[-1][0][0]) < len(text)
    for prompt, count in ((PROMPTS[0], 1), ([5, 6, 7], 20)):  # without foreseen, or beyond it
        with pytest.raises(ValueError, match="Oracle must know the whole text beforehand: it scores texts"):
            llm.generate({"prompt_token_ids": prompt}, SamplingParams(max_tokens=count, detokenize=False))
    assert_idle(llm)


def test_another_budget_needs_no_other_program_and_another_method_another_engine():
    llm = make_llm(kv_eviction={"method": "h2o", "budget": 12, "interval": 3}, block_size=SIZE, num_blocks=64)
    asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    llm.warm_up()
    before, texts = llm.num_compilations, []
    for budget in (12, 20, 0.5):
        llm.set_kv_eviction({"method": "h2o", "budget": budget, "interval": 4})
        texts.append([o.outputs[0].token_ids for o in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], asked)])
    assert llm.num_compilations == before and texts[0] != texts[1]
    assert "; attention full, evicted by H2O to a budget of 0.5; " in repr(llm)
    with pytest.raises(ConfigError, match="make an engine for it"):
        llm.set_kv_eviction({"method": "tova", "budget": 12})
    with pytest.raises(ConfigError, match="their pattern cannot change"):
        llm.set_pattern(AttentionPattern(window=8))
    assert_idle(llm)


def test_emptied_blocks_serve_more_requests_at_once():
    """A pool that holds two full texts of fifteen blocks holds more of those that keep a fifth."""
    prompts = [(2 + RNG.permutation(VOCAB - 2)[:40]).tolist() for _ in range(24)]
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    running, steps = {}, {}
    for budget in (None, 0.2):
        eviction = None if budget is None else {"method": "window", "budget": budget, "prompts": "streamed"}
        llm = make_llm(kv_eviction=eviction, block_size=SIZE, num_blocks=30, max_num_seqs=20, max_num_batched_tokens=64)
        llm.generate([{"prompt_token_ids": p} for p in prompts], asked)
        running[budget] = np.mean([record.num_running for record in llm.records if record.num_waiting])
        steps[budget] = len(llm.records)
    assert running[0.2] >= 3.5 * running[None]
    assert 2 * steps[0.2] < steps[None]
