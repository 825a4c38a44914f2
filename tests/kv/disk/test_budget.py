"""The disk tier keeps to its budget: which files go first when room is needed."""

import contextlib
import os

from tests.kv.disk.blocks import Later, chain
from tests.kv.disk.tiers import FILE, assert_books, files, read, write


def test_the_budget_holds_and_the_least_recently_used_goes_first(open_tier):
    tier = open_tier(budget=3 * FILE)
    a, b, c, d, e = (chain(1, name)[0] for name in "abcde")
    write(tier, a, b, c)
    assert read(tier, a)
    write(tier, d)
    assert_books(tier)
    assert [x.key in tier for x in (a, b, c, d)] == [True, False, True, True]
    write(tier, e)
    assert [x.key in tier for x in (a, c, d, e)] == [True, False, True, True]
    assert tier.counters.replaced == 2 and all(read(tier, x) for x in (a, d, e))


def test_children_go_before_their_parents(open_tier):
    tier = open_tier(budget=6 * FILE + 10)
    text = chain(5)
    write(tier, *text)
    others = [chain(1, f"other{n}")[0] for n in range(6)]
    left = []
    for other in others[:5]:
        write(tier, other)
        assert read(tier, other)
        left.append([b.key in tier for b in text].index(False) if any(b.key not in tier for b in text) else 5)
    assert left == [5, 4, 3, 2, 1]
    assert_books(tier)


def test_a_text_longer_than_the_budget_that_comes_from_its_end_keeps_its_beginning(open_tier):
    tier = open_tier(budget=3 * FILE + 10)
    text = chain(6)
    write(tier, *text[::-1])  # as blocks are replaced on the host
    assert [b.key in tier for b in text] == [True] * 3 + [False] * 3
    assert_books(tier)


def test_a_block_does_not_push_out_what_it_continues(open_tier):
    tier = open_tier(budget=3 * FILE)
    text = chain(4)
    write(tier, *text)
    assert [b.key in tier for b in text] == [True] * 3 + [False] and tier.counters.dropped == 1
    assert_books(tier)


def test_use_and_parents_count_across_restarts(open_tier):
    a, b, c = (chain(3, name) for name in "abc")
    with contextlib.closing(open_tier(budget=9 * FILE)) as tier:
        write(tier, *a, *b)
        for n, facts in enumerate((*b, *a)):  # written first, used last; times as a slow disk would give them
            assert read(tier, facts)
            os.utime(tier._path(facts.key), ns=(n * 10**9, n * 10**9))
    tier = open_tier(budget=6 * FILE)
    write(tier, *c[:2])
    assert [x.key in tier for x in b] == [True, False, False] and all(x.key in tier for x in a)
    assert_books(tier)


def test_reading_marks_a_file_as_used_for_the_next_start(open_tier):
    tier = open_tier()
    (facts,) = chain(1)
    write(tier, facts)
    os.utime(tier._path(facts.key), (0, 0))
    assert read(tier, facts)
    assert tier._path(facts.key).stat().st_mtime > 10**9


def test_a_smaller_budget_takes_effect_at_the_start(open_tier):
    text = chain(8)
    with contextlib.closing(open_tier()) as tier:
        write(tier, *text)
    tier = open_tier(budget=3 * FILE + 10)
    assert [b.key in tier for b in text] == [True] * 3 + [False] * 5
    assert_books(tier)


def test_a_budget_below_one_file_keeps_nothing_with_one_warning(open_tier):
    worker = Later()
    tier = open_tier(budget=FILE - 1, executor=worker)
    write(tier, *chain(3))
    worker.run()
    write(tier, *chain(3))
    assert not worker.tasks and not files(tier) and not tier.keys()
    assert tier.enabled and tier.counters.dropped == 6
    assert open_tier.told == [f"disk_cache_bytes is {FILE - 1:,}, one block takes {FILE:,}: none is kept on disk"]
