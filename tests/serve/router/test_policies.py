"""Decisions of each policy in hand-made cases: prefill of 1,000 tokens/s, blocks of 100 tokens."""

import collections
import itertools
import math

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.serve.router import POLICIES, Router, read_policy
from tests.serve.router.invariants import check_router
from tests.serve.router.prompts import SETTINGS, cache, request, router


def load(r, server, num_prompt, count=1, name="load"):
    for n in range(count):
        asked = request(f"{name} {server} {n}", num_prompt)
        assert r.choose(asked, 0.0, exclude=set(r.servers) - {server}) == server


def choices(r, count, text="", num_prompt=1000, now=0.0):
    """Returns how often each server is chosen for requests that end at once."""
    found = collections.Counter()
    for n in range(count):
        found[r.choose(request(f"try {n}", num_prompt, text), now)] += 1
        r.finished(f"try {n}", now)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_turns_with_servers_that_are_alike(policy):
    r = Router(range(4), policy, SETTINGS, seed=1)
    found = collections.Counter(r.choose(request(n, 300), 0.0) for n in range(400))
    assert len(found) == 4 and min(found.values()) >= (40 if policy in ("random", "chwbl") else 80)
    check_router(r)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_chooses_a_server_that_drains_or_is_gone(policy):
    r = Router("abcd", policy, SETTINGS)
    for server in "abcd":
        cache(r, server, "xyz", name=f"warm {server}")
    r.set_weight("b", 0.0)
    r.remove("c", 0.0)
    assert set(choices(r, 60, "xyz", 400)) <= {"a", "d"} and choices(r, 30, "", 300).keys() <= {"a", "d"}
    check_router(r)


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_without_a_full_block_are_served(policy):
    r = Router("ab", policy, SETTINGS)
    for n in range(20):
        r.choose(request(n, 50), 0.0)
    check_router(r)


# ---------------------------------------------------------------------- CHWBL


def test_chwbl_sends_equal_beginnings_to_one_server_whatever_follows():
    r = router("chwbl", range(8))
    for text in ("ab", "cd", "ef"):
        assert len(choices(r, 20, text)) == 1
    assert len({*choices(r, 1, "ab"), *choices(r, 1, "cd"), *choices(r, 1, "ef"), *choices(r, 1, "gh")}) > 1


def test_chwbl_bounds_requests_by_a_quarter_above_the_mean():
    r = router("chwbl", range(4))
    found = collections.Counter()
    for n in range(1, 101):
        found[r.choose(request(n, 300, "ab"), 0.0)] += 1
        assert max(found.values()) <= math.ceil(1.25 * n / 4)
    assert min(found.values()) > 0


def test_chwbl_moves_few_prompts_when_a_server_leaves():
    r = router("chwbl", range(8))
    before = {n: next(iter(choices(r, 1, f"{n}x"[:2], 300))) for n in range(10)}
    r.remove(7, 0.0)
    after = {n: next(iter(choices(r, 1, f"{n}x"[:2], 300))) for n in range(10)}
    assert all(after[n] == before[n] for n in before if before[n] != 7)


# ---------------------------------------------------------------------- SGLang's


def test_cache_aware_follows_a_match_of_more_than_its_threshold():
    r = router("cache_aware", "ab")
    cache(r, "a", "abcd")
    assert choices(r, 5, "abcd", 1000) == {"a": 5}  # 0.4 of the prompt
    r = router("cache_aware", "ab")
    cache(r, "a", "abc")
    assert choices(r, 1, "abc", 1000) == {"b": 1}  # 0.3 is not above it: the smallest cache


def test_cache_aware_looks_at_requests_only_when_both_differences_are_large():
    r = router({"name": "cache_aware", "balance_abs": 4}, "ab")
    cache(r, "a", "abcd")
    load(r, "a", 100, 4)
    assert choices(r, 1, "abcd", 500) == {"a": 1}
    load(r, "a", 100, 1, name="fifth")
    assert choices(r, 1, "abcd", 500) == {"b": 1}
    load(r, "b", 100, 20)
    load(r, "a", 100, 20, name="more")
    r = router({"name": "cache_aware", "balance_abs": 4}, "ab")
    cache(r, "a", "abcd")
    load(r, "a", 100, 16)
    load(r, "b", 100, 11)
    assert choices(r, 1, "abcd", 500) == {"a": 1}  # 5 more, but less than 1.5 times as many


# ---------------------------------------------------------------------- Preble's


def test_e2_exploits_a_match_longer_than_the_rest():
    r = router({"name": "e2", "rebalance": 100}, "ab")
    cache(r, "a", "abcdef")
    load(r, "b", 100, 2)  # so that loads are not skewed without bound
    assert choices(r, 3, "abcdef", 1000) == {"a": 3}


def test_e2_explores_by_the_load_of_the_last_three_minutes():
    r = router("e2", "ab")
    cache(r, "a", "abcdef")  # 0.6 s of load on a, which is over but counts
    assert r.choose(request("half", 1200, "abcdef"), 1.0) == "b"  # 0.6 + 0.6 s there, 1.2 s here: not yet
    r.finished("half", 1.0)
    r = router("e2", "ab")
    cache(r, "a", "ab")
    assert choices(r, 1, "ab", 1000, now=100.0) == {"b": 1}
    r.index.clear(0)
    r.index.clear(1)
    assert r.choose(request("later", 900), 179.0) == "a"  # 0.2 s against 1.0 s


def test_e2_forgets_old_load():
    r = router("e2", "ab")
    load(r, "a", 5000)
    assert choices(r, 1, "", 500, now=10.0) == {"b": 1}
    found = choices(r, 40, "", 100, now=500.0)
    assert min(found["a"], found["b"]) > 10


def test_e2_does_not_exploit_the_most_loaded_server_while_loads_are_skewed():
    r = router("e2", "ab")
    cache(r, "a", "abcdef")
    load(r, "a", 3000)
    load(r, "b", 100)
    assert choices(r, 1, "abcdef", 1000) == {"b": 1}


# ---------------------------------------------------------------------- the table of prefixes


def table(**settings):
    return {"name": "prefix_table", "min_rate": 0.05, "window_s": 60, **settings}


def ask(r, count, text, num_prompt=600, now=0.0, every_s=1.0, serve_s=0.5):
    """Sends requests, which all end; returns their servers."""
    found = []
    for n in range(count):
        name = f"{text} {now:.3f} {n}"
        found.append(r.choose(request(name, num_prompt, text), now))
        r.first_token(name, now + serve_s)
        r.finished(name, now + serve_s)
        now += every_s
    check_router(r)
    return found


def test_a_frequent_prefix_gets_a_server_of_its_own():
    r = router(table(), "abcd")
    servers = ask(r, 12, "abcd")
    prefix = r.policy.table.prefixes[b"abcd"]
    assert prefix.num_tokens == 400 and len(prefix.members) == 1
    assert set(servers[6:]) == {"abcd"[prefix.members[0]]}
    # Shorter ones were frequent first, and are forgotten when nobody asks for them.
    ask(r, 100, "abcd", now=12.0)
    assert list(r.policy.table.prefixes) == [b"abcd"]


def test_the_longest_prefix_decides_and_one_in_all_requests_is_none():
    r = router(table(), "abcd")
    for n in range(12):
        ask(r, 1, "abcd", now=2.0 * n)
        ask(r, 1, "abxy", now=2.0 * n + 1)
    assert b"ab" not in r.policy.table.prefixes
    assert r.policy.table.find(request("x", 700, "abcdef").hashes).key == b"abcd"
    assert r.policy.table.find(request("x", 700, "abxyef").hashes).key == b"abxy"


def test_a_configured_prefix_stays():
    r = router(table(), "abcd")
    r.policy.configure(request("x", 300, "abc").hashes, 100, now=0.0)
    ask(r, 3, "zz", now=500.0, every_s=100)
    assert [prefix.num_blocks for prefix in r.policy.table.prefixes.values()] == [3]
    ask(r, 2, "abc", now=900.0)
    assert len(next(iter(r.policy.table.prefixes.values())).members) == 1


def test_a_set_grows_by_one_a_second_while_its_servers_are_busy_and_shrinks_later():
    r = router(table(grow_after_s=5, shrink_after_s=60), "abcdefgh")
    r.policy.configure(request("x", 300, "abc").hashes, 100, now=0.0)
    [prefix] = r.policy.table.prefixes.values()
    sizes = []
    for second in range(20):  # 2.4 s of work a second
        for n in range(8):
            name = f"{second} {n}"
            r.choose(request(name, 600, "abc"), second + n / 8)
            r.finished(name, second + n / 8)
        sizes.append(len(prefix.members))
    assert sizes[0] == 1 and sizes[-1] in (3, 4)
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(sizes))
    most = len(prefix.members)
    ask(r, 400, "abc", now=20.0)  # 0.3 s of work a second
    assert len(prefix.members) == 1 < most
    check_router(r)


def test_requests_go_outside_when_waiting_costs_more_than_the_prefix():
    r = router(table(), "ab")
    ask(r, 10, "abcd")
    prefix = r.policy.table.prefixes[b"abcd"]
    home, other = "ab"[prefix.members[0]], "ab"[1 - prefix.members[0]]
    now = 20.0
    found = [r.choose(request(f"burst {n}", 600, "abcd"), now) for n in range(6)]
    # 0.2 s each: after two, a third would wait for 0.4 s, as long as the prefix takes; the fourth would for longer.
    assert found[:3] == [home] * 3 and found[3] == other
    check_router(r)


def test_a_session_stays_where_its_turns_are_cached():
    r = router(table(), "ab")
    ask(r, 10, "abcd")
    prefix = r.policy.table.prefixes[b"abcd"]
    other = "ab"[1 - prefix.members[0]]
    cache(r, other, "abcdefgh", now=10.0)
    assert r.choose(request("turn", 1000, "abcdefgh"), 10.0) == other


def test_few_prefixes_for_each_server():
    r = router(table(max_prefixes_per_server=2), "ab")
    for text in ("aa", "bb", "cc", "dd", "ee", "ff"):
        r.policy.configure(request("x", 200, text).hashes, 100, now=0.0)
    for at, text in enumerate(("aa", "bb", "cc", "dd", "ee", "ff")):
        ask(r, 3, text, now=10.0 * at)
    assert r.policy.table.num_prefixes.tolist() == [2, 2]
    homeless = [prefix for prefix in r.policy.table.prefixes.values() if not prefix.members]
    assert len(homeless) == 2


def test_prefixes_fill_half_of_a_pool_at_most():
    r = router(table(), "ab", block_size=100, prefill_tokens_per_s=1000, pool_tokens=1500)
    r.policy.configure(request("x", 800, "abcdefgh").hashes, 100, now=0.0)
    r.policy.configure(request("x", 700, "ijklmno").hashes, 100, now=0.0)
    ask(r, 3, "abcdefgh", 900)  # 800 of 1,500 tokens are too many
    ask(r, 3, "ijklmno", 900, now=5.0)
    assert [len(r.policy.table.prefixes[key].members) for key in (b"abcdefgh", b"ijklmno")] == [0, 1]


def test_after_a_death_a_set_grows_again_by_demand():
    r = router(table(), "abc")
    ask(r, 10, "abcd")
    prefix = r.policy.table.prefixes[b"abcd"]
    gone = "abc"[prefix.members[0]]
    r.remove(gone, 10.0)
    assert not prefix.members
    assert gone not in ask(r, 5, "abcd", now=11.0) and len(prefix.members) == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"name": "e2", "rebalanse": 2}, "policy 'e2' has no setting 'rebalanse'; the nearest is 'rebalance'"),
        ({"name": "e2", "window_s": 0}, "window_s is 0, must be a finite number above 0"),
        ({"name": "chwbl", "bound": 1}, "bound is 1, must be a finite number above 1"),
        ({"name": "cache_aware", "cache_threshold": 2}, "cache_threshold is 2, must be a number from 0 to 1"),
        ({"name": "prefix_table", "shrink_below": 0.5}, "shrink_below is 0.5, must be a number from 0 to 0.4"),
        ({"name": "prefix_table", "min_blocks": 0}, "min_blocks is 0, must be an integer from 1"),
    ],
)
def test_wrong_settings_are_refused(setting, said):
    with pytest.raises(ConfigError, match=said):
        read_policy(setting)
