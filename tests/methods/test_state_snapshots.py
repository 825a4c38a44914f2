"""Policies of state snapshots: which beginnings of texts later prompts find, and what is replaced."""

import functools

import numpy as np
import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core.patterns import FAR
from ksana_jax.kv.counters import Counters
from ksana_jax.kv.prefix_index import PrefixIndex
from ksana_jax.kv.state import KVState
from ksana_jax.kv.state_slots import StateSlots
from ksana_jax.methods.replacement import cost_aware, lru
from tests import machine
from tests.golden.cases import golden_case

pytestmark = pytest.mark.usefixtures("few_shapes")
CASE = golden_case("lfm2-gqa-conv-tied")
SMALL = {"block_size": 4, "max_num_seqs": 4, "query_tile": 4, "max_num_batched_tokens": 24, "max_model_len": 112}
TEXT = np.random.default_rng(5).integers(2, 128, 90).tolist()


def engine(method, **more) -> LLM:
    snapshots = {"method": method, "num_slots": 40}
    return LLM(str(CASE.model_dir), **SMALL | more, enable_prefix_caching=True, state_snapshots=snapshots)


def ask(llm: LLM, prompt: list[int], tokens: int = 16) -> tuple[int, list[int]]:
    """Returns how many tokens of a prompt are cached, and the text with the answer."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    llm.engine.scheduler.check()
    return output.num_cached_tokens, [*prompt, *output.outputs[0].token_ids]


def test_the_end_of_a_request_is_found_by_the_next_turn_alone():
    found, num_snapshots = {}, {}
    for method in ("prompt_end", "request_end", "marconi"):
        llm = engine(method)
        _, text = ask(llm, TEXT[:21])
        found[method] = ask(llm, [*text, 5, 9])[0], ask(llm, TEXT[:22])[0]
        num_snapshots[method] = llm.engine.memory.counters.snapshots
    # Of 37 tokens, the last is not computed: the state after 36 is cached. The last prompt ends after 20.
    assert found == {"prompt_end": (20, 20), "request_end": (36, 0), "marconi": (36, 0)}
    assert num_snapshots == {"prompt_end": 2, "request_end": 3, "marconi": 4}


@pytest.mark.parametrize("settings", [{"num_scheduler_steps": 3}, {"async_scheduling": False}], ids=str)
def test_a_chat_finds_all_that_was_computed_however_steps_are_scheduled(settings):
    llm, text = engine("request_end", **settings), TEXT[:9]
    for turn in range(3):
        cached, text = ask(llm, [*text, 5, 9], 11)
        assert cached == (len(text) - 14) // 4 * 4 * (turn > 0)
    assert llm.engine.memory.counters.snapshots == 3


def test_a_prompt_is_one_step_whatever_of_it_is_cached():
    llm = engine("prompt_end")
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    outputs = [llm.generate([TEXT[:n]], params, use_tqdm=False)[0] for n in (22, 31, 40)]
    assert [output.num_cached_tokens for output in outputs] == [0, 20, 28]
    assert [record.num_tokens for record in llm.records] == [22, 11, 12]


def test_a_request_that_ends_gives_back_the_slot_of_a_snapshot_under_way():
    llm = engine("prompt_end")
    request = llm.engine.add_request(np.array(TEXT[:40]), SamplingParams(detokenize=False))
    llm.engine.step()  # the next one is under way
    scheduler, pool = llm.engine.scheduler, llm.engine.memory.states.pool
    assert scheduler.rows.state_via.min() < FAR
    llm.engine.abort(request.request_id)
    scheduler.check()
    assert pool.num_used == 0


def test_an_answer_shorter_than_a_block_leaves_the_end_of_its_prompt():
    llm = engine("request_end")
    ask(llm, TEXT[:22], 1)
    assert ask(llm, TEXT[:30])[0] == 20


@pytest.mark.parametrize("method", ["forks", "marconi"])
def test_the_third_text_with_a_beginning_finds_it(method):
    llm = engine(method)
    assert [ask(llm, [*TEXT[:30], first, 7, 7])[0] for first in (3, 4, 5, 6)] == [0, 0, 28, 28]


def test_a_beginning_that_is_asked_for_again_is_a_fork():
    llm = engine("forks")
    assert [ask(llm, TEXT[:33])[0] for _ in range(3)] == [0, 0, 32]


def test_no_prompt_waits_for_the_end_of_a_request():
    llm = engine("request_end")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    for num_tokens in (20, 30):
        llm.engine.add_request(np.array(TEXT[:num_tokens]), params)
        for _ in range(2):
            llm.engine.step()
    assert not llm.engine.scheduler.queue.entries


@machine.native_products
@pytest.mark.cpu("invariant numerics")
def test_chats_together_from_cached_states_have_the_bits_of_each_turn_alone_and_fresh():
    folder = str(golden_case("qwen3_5-gated-delta-tied").model_dir)
    settings = SMALL | {"numerics": "invariant", "block_size": 16}
    fresh = LLM(folder, **settings | {"max_num_batched_tokens": 19})
    cached = LLM(folder, **settings, enable_prefix_caching=True, state_snapshots={"method": "marconi"})
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, detokenize=False)
    texts, found = [TEXT[:33] + [n] for n in (3, 4, 5)], []
    for _ in range(3):
        together = cached.generate(texts, params, use_tqdm=False)
        alone = [fresh.generate([text], params, use_tqdm=False)[0] for text in texts]
        for one, other in zip(together, alone, strict=True):
            (a,), (b,) = one.outputs, other.outputs
            assert a.token_ids == b.token_ids and a.logprobs == b.logprobs
        texts = [[*text, *one.outputs[0].token_ids, 7] for text, one in zip(texts, together, strict=True)]
        found.append([one.num_cached_tokens for one in together])
    assert found[1:] == [[48, 48, 48], [64, 64, 64]]


@pytest.mark.parametrize("policy, kept", [(lru, "short"), (cost_aware, "long")])
def test_cost_aware_replacement_keeps_the_state_that_takes_longer_to_compute(policy, kept):
    index = PrefixIndex(4)
    index.group_keys = ("", "states")
    slots = StateSlots(2, 1, index, policy, Counters(), write="drop", host_data=None, disk=None)
    texts = {"long": TEXT[:40], "short": TEXT[50:58]}
    for tokens in texts.values():
        slots.cache(KVState(), np.array(tokens), len(tokens), slot := slots.take())
        slots.give_back(slot)
    slots.take()
    assert [len(tokens) for name, tokens in texts.items() if name == kept] == [
        4 * (node.depth + 1) for node in slots.node_of.values()
    ]


def test_a_state_costs_what_was_computed_since_the_one_before():
    index = PrefixIndex(4, cost=lambda position: 1 + position / 4)
    index.group_keys = ("", "states")
    slots = StateSlots(3, 1, index, cost_aware, Counters(), write="drop", host_data=None, disk=None)
    keep = functools.partial(slots.cache, KVState(), np.array(TEXT))
    for num_tokens in (12, 20, 16):
        keep(num_tokens, slot := slots.take())
        slots.give_back(slot)
    costs = {4 * (node.depth + 1): node.cost for node in slots.node_of.values()}
    assert costs == {12: 1 + 2 + 3, 20: 4 + 5, 16: 4}
