"""The router: ledger, servers that come and go, and the policies that look at load."""

import collections

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.serve.router import (
    BlockRemoved,
    BlockStored,
    NoServer,
    Policy,
    Router,
    RouterSettings,
    hashes_of,
    read_policy,
)
from tests.serve.router.invariants import check_router
from tests.serve.router.prompts import SETTINGS, request, router


def test_a_ledger_is_the_sum_of_unfinished_requests():
    r = router("round_robin")
    for name in range(4):
        r.choose(request(name, 500), now=0.0)
    assert r.ledger.work.tolist() == [1000, 500, 500] and r.ledger.requests.tolist() == [2, 1, 1]
    r.first_token("0", now=0.5)
    r.progress("0", 3, now=0.6)
    assert r.ledger.work.tolist() == [500, 500, 500]
    assert r.ledger.rows.tolist() == [1, 0, 0] and r.ledger.held.tolist() == [1003, 500, 500]
    check_router(r)
    assert r.finished("0", now=1.0) and not r.finished("0", now=1.0)
    assert all(r.finished(str(name), now=1.0) for name in (1, 2, 3))
    assert not r.ledger.work.any() and not r.ledger.held.any() and not r.ledger.live
    check_router(r)


def test_the_request_in_front_progresses_up_to_its_end():
    r = router("least_work", "a")
    r.choose(request(0, 1000), now=0.0)
    r.choose(request(1, 2000), now=0.0)
    waits = [float(r.ledger.wait_s(now)[0]) for now in (0.0, 0.25, 1.0, 5.0)]
    assert waits == [3.0, 2.75, 2.0, 2.0]


def test_the_pace_of_prefill_is_measured():
    r = router("least_work", "a")
    for n in range(100):
        r.choose(request(n, 1000), now=4.0 * n)
        r.first_token(str(n), now=4.0 * n + 2)
        r.finished(str(n), now=4.0 * n + 3)
    r.choose(request("last", 1000), now=1000.0)
    assert r.ledger.wait_s(1000.0)[0] == pytest.approx(2.0, rel=0.05)


def test_least_work_counts_tokens():
    r = router("least_work", "ab")
    first = r.choose(request(0, 1000), 0.0)
    assert {r.choose(request(n, 100), 0.0) for n in range(1, 10)} == {"a", "b"} - {first}


def test_min_ttft_goes_where_a_prefix_is_until_the_queue_costs_more():
    r = router("min_ttft", "ab")
    first = r.choose(request(0, 1000, "abcdefgh"), 0.0)
    r.finished("0", 0.0)
    [other] = {"a", "b"} - {first}
    # Each has 200 tokens of its own and finds 800: the fifth would wait for 0.8 s, as much as the prefix costs.
    chosen = [r.choose(request(n, 1000, "abcdefgh"), 0.0) for n in range(1, 5)]
    assert chosen == [first] * 4
    r.choose(request("x", 100), 0.0)  # to the other server: now its wait is 0.1 s
    assert r.choose(request(5, 1000, "abcdefgh"), 0.0) == first
    assert r.choose(request(6, 1000, "abcdefgh"), 0.0) == other
    check_router(r)


def test_a_hit_in_host_memory_costs_a_copy():
    hashes = request("x", 800, "abcdefgh").hashes

    def choose(*events):
        r = router("min_ttft", "abc")
        for server, event in events:
            r.events(server, [event])
        server = r.choose(request(0, 1000, "abcdefgh"), 0.0)
        check_router(r)
        return server, r.ledger.work.sum()

    in_host = ("a", BlockStored(hashes, medium="CPU"))
    assert choose(in_host) == ("a", 400)  # 200 tokens, and a copy that takes as long as 200
    assert choose(in_host, ("b", BlockStored(hashes[:7]))) == ("b", 300)
    assert choose(in_host, ("b", BlockStored(hashes[:5]))) == ("a", 400)
    promoted = ("a", BlockStored(hashes[:6]))
    assert choose(in_host, ("b", BlockStored(hashes[:7])), promoted) == ("a", 250)
    dropped = ("a", BlockRemoved(hashes[4:]))
    assert choose(in_host, promoted, dropped) == ("a", 300)  # of the device's six, two are in host memory still


def test_blocks_that_all_servers_have_decide_nothing():
    r = router("min_ttft", "abcd")
    for n, server in enumerate("abcd"):
        others = set("abcd") - {server}
        assert r.choose(request(n, 800, "abcdefgh"), 0.0, exclude=others) == server
        r.finished(str(n), 0.0)
    chosen = collections.Counter()
    for n in range(10, 410):
        chosen[r.choose(request(n, 900, "abcdefgh"), 0.0)] += 1
        r.finished(str(n), 0.0)
    # One of them is the first to cache each request's own block, which nobody else has.
    assert min(chosen.values()) > 60, chosen


@pytest.mark.parametrize("policy", ["random", "least_work", "power_of_two", "min_ttft"])
def test_ties_are_broken_at_random_and_seeds_repeat(policy):
    def choices(seed):
        r = Router(range(8), policy, SETTINGS, seed)
        found = []
        for n in range(800):
            found.append(r.choose(request(n, 300), 0.0))
            r.finished(str(n), 0.0)
        return found

    assert choices(1) == choices(1) != choices(2)
    assert min(collections.Counter(choices(3)).values()) > 60


def test_round_robin_skips_servers_that_drain():
    r = router("round_robin", "abcd")
    r.set_weight("b", 0.0)
    assert [r.choose(request(n), 0.0) for n in range(5)] == [*"acdac"]


def test_a_server_that_warms_up_gets_its_share():
    r = router("random", "ab")
    r.set_weight("b", 0.25)
    chosen = collections.Counter(r.choose(request(n), 0.0) for n in range(4000))
    assert 0.09 < chosen["b"] / 4000 < 0.16  # half of a quarter
    r.set_weight("a", 0.0)
    assert r.choose(request("alone"), 0.0) == "b"


def test_no_server_is_an_error():
    r = router("random", "ab")
    with pytest.raises(NoServer, match="none of 2 servers is ready for another try"):
        r.choose(request(0), 0.0, exclude=["a", "b"])
    r.set_weight("a", 0.0)
    assert r.choose(request(1), 0.0) == "b"
    r.set_weight("b", 0.0)
    with pytest.raises(NoServer, match=r"none of 2 servers is ready$"):
        r.choose(request(2), 0.0)
    with pytest.raises(ValueError, match="'1' is under way"):
        r.choose(request(1), 0.0)
    check_router(r)


def test_a_server_that_is_gone_takes_its_requests_and_blocks_with_it():
    r = router("min_ttft", "ab")
    gone = r.choose(request(0, 1000, "abcdefgh"), 0.0)
    assert r.remove(gone, 1.0) == ["0"] and not r.finished("0", 1.0)
    check_router(r)
    assert r.index.match(request(1, 1000, "abcdefgh").hashes).longest == 0
    [left] = r.servers
    assert r.choose(request(1), 2.0) == left
    r.add_server("new")
    check_router(r)
    assert r.choose(request(2), 2.0) == "new"  # which took the place of the one that is gone


def test_a_full_pool_costs_a_second():
    r = Router("ab", "min_ttft", RouterSettings(block_size=100, prefill_tokens_per_s=1000, pool_tokens=2000))
    full = r.choose(request(0, 1950), 0.0)
    r.first_token("0", 0.0)
    r.choose(request(1, 500), 0.0)
    assert r.choose(request(2, 100), 0.0) != full


def test_counts_compare_expected_and_reported_hits():
    r = router("min_ttft", "a")
    r.choose(request(0, 1000, "abcd"), 0.0)
    r.finished("0", 1.0, cached_tokens=0)
    r.choose(request(1, 1000, "abcd"), 1.0)
    r.finished("1", 2.0, cached_tokens=300)
    c = r.counts
    assert (c.choices, c.prompt_tokens, c.expected_tokens) == ({"a": 2}, 2000, 400)
    assert (c.reported_tokens, c.reported_of) == (300, 400)


def test_hashes_are_the_keys_of_the_engines_prefix_cache():
    tokens = np.arange(70, dtype=np.int32)
    for salt, model in (("", ""), ("ab", "c"), ("a", "bc")):
        links = PrefixIndex(16, Scope(model)).chain(tokens, salt, [], 4)
        assert hashes_of(tokens, 16, salt, model) == [link.key for link in links]
    assert hashes_of(tokens[:15], 16) == [] and hashes_of(tokens, 16, "ab", "c") != hashes_of(tokens, 16, "a", "bc")


class Last(Policy):
    def choose(self, request, view):
        return 7


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("min_tftt", "there is no policy 'min_tftt'; the nearest of .* is 'min_ttft'"),
        ({"name": "random", "seed": 3}, "policy 'random' has no setting 'seed'; it has none"),
        ({"policy": "random"}, "must have a name"),
        ("collections:Counter", "not a subclass of ksana_jax.serve.router.Policy"),
        (3, "policy is 3, must be one of random"),
    ],
)
def test_a_wrong_policy_is_refused(setting, said):
    with pytest.raises(ConfigError, match=said):
        read_policy(setting)


def test_a_policy_that_chooses_a_server_that_is_not_there_is_found_out():
    with pytest.raises(ValueError, match="policy Last chose server 7, which is not ready"):
        Router("ab", Last).choose(request(0), 0.0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_size": 0}, "block_size is 0, must be an integer from 1"),
        ({"prefill_tokens_per_s": 0}, "prefill_tokens_per_s is 0, must be a finite number above 0"),
        ({"ttl_s": "2"}, "ttl_s is '2'"),
    ],
)
def test_wrong_settings_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        RouterSettings(**settings)
    with pytest.raises(ConfigError, match="there are two servers 'a'"):
        Router("aba")
