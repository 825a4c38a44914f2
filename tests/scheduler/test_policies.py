"""Orders of service: the value of each policy, and longest_prefix's effect on requests that share a prefix."""

import itertools
import json

import numpy as np
import pytest

from ksana_jax import EngineConfig
from ksana_jax.core.config import ConfigError
from ksana_jax.engine.settings import check_policies
from ksana_jax.methods.scheduling import LongestPrefix
from ksana_jax.scheduler.policies import SCHEDULING_POLICIES, make_policy
from ksana_jax.scheduler.sequence import Sequence
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens, run, step
from tests.kv.prefixes import sequence


def order(policy, seqs) -> list[int]:
    ranks = [(policy.rank(seq), seq.seq_id) for seq in seqs]
    return [seq_id for _, seq_id in sorted(ranks)]


def test_first_come_first_served_is_the_default():
    assert EngineConfig().policy == "fcfs" == next(iter(SCHEDULING_POLICIES))
    seqs = [sequence(prompt_of(9 - i), seq_id=i) for i in range(4)]
    assert order(make_policy("fcfs", 4), seqs) == [0, 1, 2, 3]


def test_simple_policies_rank_by_what_they_say():
    seqs = [
        sequence(prompt_of(5), max_tokens=9, seq_id=0),
        sequence(prompt_of(3), max_tokens=20, seq_id=1),
        sequence(prompt_of(8), max_tokens=1, seq_id=2),
    ]
    assert order(make_policy("shortest_first", 4), seqs) == [1, 0, 2]
    assert order(make_policy("fewest_tokens_left", 4), seqs) == [2, 0, 1]


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'lifo', must be one of fcfs, .*, longest_prefix"):
        make_policy("lifo", 4)


def longest_first(seq: Sequence) -> float:
    return -seq.num_prompt


class EveryOther:
    """A policy with a memory: every second sequence goes before all others."""

    def __init__(self, max_num_seqs: int):
        self.max_num_seqs, self.count = max_num_seqs, 0

    def rank(self, seq: Sequence) -> int:
        self.count += 1
        return self.count % 2


@pytest.mark.parametrize("policy", [longest_first, "tests.scheduler.test_policies:longest_first"])
def test_a_policy_of_the_users_own_decides_who_is_served_first(policy):
    engine = make_engine(policy=policy, max_num_seqs=1)
    requests = [engine.add_request(prompt_of(length), asking(1)) for length in (3, 9, 5)]
    run(engine)
    finished = [request.metrics.finished_s or 0 for request in requests]
    assert finished[1] < finished[2] < finished[0]


def test_a_policy_that_is_a_class_is_made_for_each_scheduler_with_its_number_of_rows():
    one, other = make_policy(EveryOther, 7), make_policy("tests.scheduler.test_policies:EveryOther", 7)
    assert isinstance(one, EveryOther) and one is not other and one.max_num_seqs == 7
    assert order(one, [sequence(prompt_of(3), seq_id=i) for i in range(4)]) == [1, 3, 0, 2]


def test_settings_with_a_policy_of_the_users_own_are_checked_at_once_and_recorded_by_name():
    config = EngineConfig(policy=longest_first, prefix_replacement="fifo")
    assert config.policy is longest_first
    recorded = json.loads(json.dumps(config.plain()))
    assert recorded["policy"] == "tests.scheduler.test_policies:longest_first"
    assert EngineConfig(**recorded).plain() == recorded
    for wrong in ([], None, 5, "lifo", "tests.scheduler.test_policies:SCHEDULING_POLICIES"):
        with pytest.raises(ConfigError, match=r"^policy is "):
            check_policies(EngineConfig(policy=wrong))
        with pytest.raises(ConfigError, match=r"^prefix_replacement is "):
            check_policies(EngineConfig(prefix_replacement=wrong))


def texts_of(groups: int, length: int = 40) -> list[np.ndarray]:
    """One prefix per group."""
    return [prompt_of(length, seed=g) for g in range(groups)]


def test_requests_of_a_group_stand_together_in_order_of_the_first_request():
    a, b = texts_of(2)
    seqs = [
        sequence(np.append(text, tail), seq_id=i)
        for i, (text, tail) in enumerate([(b, 5), (a, 9), (b, 3), (a, 1), (b, 4), (a, 5)])
    ]
    assert order(LongestPrefix(4, patience=100), seqs) == [2, 4, 0, 3, 5, 1]


def test_within_a_group_the_longest_common_prefixes_are_neighbours():
    base = prompt_of(40)
    rng = np.random.default_rng(0)
    branches = [np.concatenate([base, prompt_of(8, seed=s)]) for s in range(4)]
    seqs = [sequence(np.concatenate([branches[i % 4], rng.integers(0, 300, 3)]), seq_id=i) for i in range(20)]
    served = order(LongestPrefix(4, patience=100), seqs)
    changes = sum(a % 4 != b % 4 for a, b in itertools.pairwise(served))
    assert changes == 3
    # In the order of the numbers, not of their bytes: 256 comes after 3.
    pair = [sequence([*base, 256], seq_id=0), sequence([*base, 3], seq_id=1)]
    assert order(LongestPrefix(4, patience=100), pair) == [1, 0]


def test_salts_do_not_share_a_group():
    [text] = texts_of(1)
    seqs = [
        sequence(np.append(text, 9), "a", seq_id=0),
        sequence(np.append(text, 1), "b", seq_id=1),
        sequence(np.append(text, 2), "a", seq_id=2),
    ]
    assert order(LongestPrefix(4, patience=100), seqs) == [2, 0, 1]


def test_nobody_is_overtaken_by_more_than_patience_requests():
    patience, lonely = 8, 3
    popular, other = texts_of(2)
    policy = LongestPrefix(4, patience=patience)
    seqs = [sequence(np.append(popular, 100 - i) if i != lonely else other, seq_id=i) for i in range(60)]
    served = order(policy, seqs)
    before = served.index(lonely) - sum(i < lonely for i in served[: served.index(lonely)])
    assert 0 < before <= patience
    for place, seq_id in enumerate(served):
        assert sum(i > seq_id for i in served[:place]) <= patience


def test_groups_that_take_in_nobody_any_more_are_forgotten():
    policy = LongestPrefix(4, patience=4)
    for i in range(10_000):
        policy.rank(sequence([i // 100, i % 100], seq_id=i))
    assert len(policy._first) <= 4098


def test_two_schedulers_do_not_share_groups():
    one, other = make_policy("longest_prefix", 4), make_policy("longest_prefix", 4)
    text = prompt_of(40)
    one.rank(sequence(text, seq_id=0))
    assert other.rank(sequence(text, seq_id=7))[0] == 7


@pytest.mark.parametrize(("policy", "num_computed"), [("longest_prefix", 2), ("fcfs", 6)])
def test_requests_that_share_a_prefix_run_together_and_compute_it_once(policy, num_computed):
    """Two alternating prefixes, a pool that holds one: first come, first served computes them again and again."""
    prefixes = texts_of(2, 32)
    engine = make_engine(
        num_blocks=10, caching=True, policy=policy, max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64
    )
    requests = [engine.add_request(np.append(prefixes[i % 2], [i, i]).astype(np.int32), asking(3)) for i in range(6)]
    run(engine)
    assert sum(r.output().num_cached_tokens < 32 for r in requests) == num_computed
    for r in requests:
        assert r.output().outputs[0].token_ids == reference_tokens(r.prompt_token_ids, 3, FULLY)


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix"])
def test_no_request_starves_under_lasting_load(policy):
    popular, other = texts_of(2, 32)
    engine = make_engine(
        num_blocks=24, caching=True, policy=policy, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64
    )
    lonely = None
    for turn in range(60):
        engine.add_request(np.append(popular, turn).astype(np.int32), asking(4))
        if turn == 3:
            lonely = engine.add_request(other, asking(4))
        step(engine)
    assert lonely is not None and lonely.finished
    assert len(engine.scheduler.waiting) > 5, "the load did last"
    run(engine)
