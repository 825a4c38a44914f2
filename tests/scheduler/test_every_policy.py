"""Properties of every policy: of SCHEDULING_POLICIES, and of two toys whose ranks change while sequences wait."""

import numpy as np
import pytest

from ksana_jax.scheduler.policies import SCHEDULING_POLICIES
from tests.engine.small import Letters, assert_idle, complete, make_llm
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens, run, step


class ShortestFirstAgeing:
    """Shortest prompt first, and a waiting sequence comes a token forward in each step: none waits for ever."""

    def __init__(self, max_num_seqs: int):
        pass

    def rank(self, seq) -> float:
        return seq.num_prompt

    def reorder(self, waiting, memory) -> None:
        for seq in waiting:
            seq.rank -= 1


class MostCachedFirst:
    """The sequence with the most cached tokens comes first, whenever it arrived."""

    def __init__(self, max_num_seqs: int):
        pass

    def rank(self, seq) -> int:
        return 0

    def reorder(self, waiting, memory) -> None:
        for seq in waiting:
            seq.rank = -memory.prefixes.num_cached_tokens(seq.kv, seq.token_ids)


LETTERS = Letters()
TOYS = [f"{__name__}:{toy.__name__}" for toy in (ShortestFirstAgeing, MostCachedFirst)]
every_policy = pytest.mark.parametrize("policy", [*SCHEDULING_POLICIES, *TOYS])


@every_policy
@pytest.mark.parametrize("settings", [{}, {"caching": True}, {"host_slots": 12, "preempt": "swap"}], ids=str)
def test_texts_are_those_of_each_request_alone(policy, settings):
    engine = make_engine(policy=policy, num_blocks=9, max_model_len=36, **settings)
    requests = []
    for turn in range(12):
        prompt = np.append(prompt_of(8, seed=turn % 3), prompt_of(1 + turn % 7, seed=turn)).astype(np.int32)
        requests.append(engine.add_request(prompt, asking(6 + turn % 13)))
        step(engine)
    run(engine)
    assert engine.scheduler.num_preemptions
    for r in requests:
        assert r.output().outputs[0].token_ids == reference_tokens(r.prompt_token_ids, r.params.max_tokens, FULLY)


@every_policy
def test_the_first_to_be_served_is_preempted_last(policy):
    engine = make_engine(policy=policy, num_blocks=9, max_num_seqs=6, max_model_len=36)
    for turn in range(30):
        if turn % 3 == 0:
            engine.add_request(prompt_of(2 + turn % 7, seed=turn), asking(9))
        step(engine)
        rows, order = engine.scheduler.rows, engine.scheduler.order
        running = [(seq.rank, seq.seq_id) for row in order if (seq := rows.seqs[row])]
        assert running == sorted(running)
        waiting = [(rank, seq_id) for rank, seq_id, _ in engine.scheduler.waiting]
        assert waiting == sorted(waiting) == [(seq.rank, seq.seq_id) for *_, seq in engine.scheduler.waiting]
    run(engine)


@every_policy
def test_an_abort_in_the_queue_leaves_the_others_in_order(policy):
    engine = make_engine(policy=policy, max_num_seqs=1)
    requests = [engine.add_request(prompt_of(3 + i, seed=i), asking(4)) for i in range(5)]
    step(engine)
    engine.abort(requests[3].request_id)
    run(engine)
    assert all(r.finished for r in requests)


@every_policy
def test_a_model_gives_the_same_texts(policy):
    prompts = ["the ant", "an otter in the rain", "x"]
    llm = make_llm(LETTERS, policy=policy, max_num_seqs=2)
    assert [complete(llm, p).token_ids for p in prompts] == [complete(make_llm(LETTERS), p).token_ids for p in prompts]
    assert_idle(llm)


def finished_in_order(engine, requests) -> list[int]:
    run(engine)
    return sorted(range(len(requests)), key=lambda i: requests[i].metrics.finished_s)


def test_a_sequence_that_ages_is_not_passed_for_ever():
    for policy, waits in (("shortest_first", True), (TOYS[0], False)):
        engine = make_engine(policy=policy, max_num_seqs=1)
        engine.add_request(prompt_of(2), asking(2))
        long = engine.add_request(prompt_of(9), asking(2))
        for turn in range(20):
            engine.add_request(prompt_of(2, seed=turn), asking(2))
            step(engine)
        assert long.finished != waits
        run(engine)


def test_what_is_cached_by_now_may_decide_the_order():
    engine = make_engine(policy=TOYS[1], caching=True, max_num_seqs=1)
    first, other = prompt_of(12), prompt_of(12, seed=1)
    texts = [first, other, np.append(first, 5).astype(np.int32), other, np.append(first, 6).astype(np.int32)]
    requests = [engine.add_request(text, asking(2)) for text in texts]
    assert finished_in_order(engine, requests) == [0, 2, 4, 1, 3]
