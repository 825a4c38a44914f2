"""The index of servers' caches: estimated from sent prompts, or exact from their events."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ksana_jax.serve.router.events import AllBlocksCleared, BlockRemoved, BlockStored
from ksana_jax.serve.router.index import CacheIndex, Match
from tests.serve.router.invariants import check_index


def names(text):
    return [text[: end + 1].encode() for end in range(len(text))]


def index(num_servers=3, **settings):
    made = CacheIndex(**settings)
    for _ in range(num_servers):
        made.grow()
    return made


def filled(match, num_servers):
    """Blocks that each server has."""
    found = np.zeros(num_servers)
    match.fill(found, [blocks for blocks, _ in match.levels])
    return found.tolist()


def blocks(made, text, num_servers=3):
    return filled(made.match(names(text)), num_servers)


def test_each_server_matches_what_was_sent_to_it():
    made = index()
    made.expect(0, names("abcd"), 0.0)
    made.expect(1, names("abxy"), 0.0)
    assert blocks(made, "abcde") == [4, 2, 0] and blocks(made, "abx") == [2, 3, 0] and blocks(made, "z") == [0] * 3
    match = made.match(names("abcde"))
    assert (
        match.levels == [(2, 0b10), (4, 0b01)] and match.longest == 4 and [match.of(n) for n in range(3)] == [4, 2, 0]
    )
    check_index(made)


def test_many_servers_are_unpacked_together():
    dice = random.Random(0)
    levels, used = [], 0
    for length in range(1, 9):
        servers = sum(1 << dice.randrange(200) for _ in range(20)) & ~used
        used |= servers
        levels.append((length, servers))
    match = Match(levels)
    assert filled(match, 200) == [match.of(n) for n in range(200)]


def test_what_was_sent_is_given_up_after_its_time():
    made = index(ttl_s=120)
    made.expect(0, names("ab"), 0.0)
    made.expect(0, names("a"), 60.0)
    made.sweep(119.0)
    assert blocks(made, "ab") == [2, 0, 0]
    made.sweep(121.0)
    assert blocks(made, "ab") == [1, 0, 0]
    made.sweep(181.0)
    assert not len(made)
    check_index(made)


def test_a_full_cache_gives_up_the_ends_of_what_was_sent_least_recently():
    made = index()
    made.capacity[0] = 5
    made.expect(0, names("abcd"), 0.0)
    made.expect(0, names("xyz"), 1.0)
    assert blocks(made, "abcd") == [2, 0, 0] and blocks(made, "xyz") == [3, 0, 0]
    check_index(made)


def test_events_name_what_is_cached():
    made = index()
    made.expect(0, names("ab"), 0.0)
    made.apply(0, [BlockStored(names("abc"))])
    made.sweep(1e6)
    assert blocks(made, "abcd") == [3, 0, 0]
    made.apply(0, [BlockStored(names("abc"), medium="CPU"), BlockRemoved(names("abc")[2:])])
    assert blocks(made, "abcd") == [3, 0, 0]  # it is still on the host
    made.apply(0, [BlockRemoved(names("abc")[2:], medium="CPU"), BlockRemoved([b"unknown"])])
    assert blocks(made, "abcd") == [2, 0, 0]
    made.apply(0, [AllBlocksCleared()])
    assert not len(made)
    made.apply(0, [])
    check_index(made)


def test_a_server_that_tells_everything_again_has_nothing_else():
    made = index()
    for server in range(2):
        made.apply(server, [BlockStored(names("ab"))])
    made.apply(0, [AllBlocksCleared(), BlockStored(names("x"))])
    assert blocks(made, "ab") == [0, 2, 0] and blocks(made, "x") == [1, 0, 0]
    check_index(made)


def states(hashes, medium="GPU"):
    return BlockStored(hashes, medium=medium, group_idx=1, kv_cache_spec_kind="mamba")


def test_a_server_with_recurrent_layers_continues_at_a_state():
    made, abcd = index(), names("abcd")
    made.apply(0, [states([]), BlockStored(abcd, group_idx=0)])
    made.apply(1, [BlockStored(abcd)])
    assert blocks(made, "abcd") == [0, 4, 0]
    made.apply(0, [states(abcd[1:2]), states(abcd[1:3], medium="CPU")])
    assert blocks(made, "abcd") == [3, 4, 0]
    made.apply(0, [BlockRemoved(abcd[1:3], medium="CPU", group_idx=1)])
    assert blocks(made, "abcd") == [2, 4, 0]  # that state is still on the device, and so is every block
    made.apply(0, [AllBlocksCleared(), BlockStored(abcd)])  # another server may have its number
    assert blocks(made, "abcd") == [4, 4, 0]
    check_index(made)


@settings(max_examples=150, deadline=None)
@given(
    told=st.lists(st.tuples(st.integers(0, 11), st.text("ab", max_size=20), st.sets(st.integers(0, 19))), max_size=30),
    text=st.text("ab", max_size=20),
)
def test_a_match_with_states_is_that_of_a_search_block_by_block(told, text):
    made, have = index(12), [(set(), set()) for _ in range(12)]
    for server, prompt, depths in [*((server, "", ()) for server in range(6)), *told]:
        chosen = [name for depth, name in enumerate(names(prompt)) if depth in depths or server >= 6]
        made.apply(server, [BlockStored(names(prompt), group_idx=0), *([states(chosen)] if server < 6 else [])])
        have[server][0].update(names(prompt))
        have[server][1].update(chosen)
    for asked in (text, *(prompt + "ab" for _, prompt, _ in told)):
        hashes, expected = names(asked), []
        for keys, after in have:
            found = [at for at, name in enumerate(hashes, 1) if name in after and keys.issuperset(hashes[:at])]
            expected.append(max(found, default=0))
        assert blocks(made, asked, 12) == expected == [made.num_matched(n, hashes) for n in range(12)]
    check_index(made)


@settings(max_examples=150, deadline=None)
@given(
    sent=st.lists(st.tuples(st.integers(0, 11), st.text("ab", max_size=40), st.floats(0, 30)), max_size=30),
    capacity=st.integers(1, 60),
    text=st.text("ab", max_size=40),
)
def test_a_match_is_that_of_a_search_block_by_block(sent, capacity, text):
    made, now = index(12, ttl_s=60), 0.0
    made.capacity[:] = capacity
    for server, prompt, passed in sent:
        now += passed
        made.sweep(now)
        made.expect(server, names(prompt), now)
    for asked in (text, *(prompt + "ab" for _, prompt, _ in sent)):
        there = [[made._holders.get(name, 0) >> server & 1 for name in names(asked)] for server in range(12)]
        expected = [(row + [0]).index(0) for row in there]
        match = made.match(names(asked))
        assert blocks(made, asked, 12) == expected == [match.of(server) for server in range(12)]
    check_index(made)
