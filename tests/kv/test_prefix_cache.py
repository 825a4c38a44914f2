"""The cached blocks that a prompt may reuse, under each pattern, and when blocks become findable."""

import functools

import numpy as np
import pytest

from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.kv.groups import KVGroup, group_layers
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.memory import KVMemory
from ksana_jax.kv.owner import check_memory
from ksana_jax.kv.prefix_index import PrefixIndex, Scope
from ksana_jax.kv.tier import DEVICE
from ksana_jax.kv.visible_range import VisibleRange
from tests.fakes import asking, make_engine, prompt_of, reference_tokens, run, step, two_layers
from tests.kv.prefixes import cache, claim, pin, sequence
from tests.reference import literal

SIZE = 4
PATTERNS = {
    "full": (FULL, FULL),
    "sliding": (AttentionPattern(window=5),) * 2,
    "as long as a block": (AttentionPattern(window=4),) * 2,
    "sinks": (AttentionPattern(window=6, num_sinks=2),) * 2,
    "many sinks": (AttentionPattern(window=3, num_sinks=9),) * 2,
    "dilated": (AttentionPattern(window=8, stride=3),) * 2,
    "global": (AttentionPattern(window=3, global_every=7),) * 2,
    "layers that differ": (AttentionPattern(window=6, num_sinks=1), AttentionPattern(window=3, global_every=9)),
    "one layer sees everything": (AttentionPattern(window=2), FULL),
}


def one_group(patterns) -> KVLayout:
    """All layers share their blocks, whatever their patterns."""
    return KVLayout((KVGroup(tuple(range(len(patterns))), VisibleRange.of(patterns)),), SIZE)


def memory_of(
    patterns=(FULL,), num_blocks: int = 16, scope: Scope | None = None, layout: KVLayout | None = None, **settings
) -> KVMemory:
    memory = KVMemory(num_blocks, PrefixIndex(SIZE), caching=True, **settings)
    scope = scope or Scope("m", repr(patterns), min(p.full_until for p in patterns))
    memory.set_layout(layout or one_group(patterns), scope)
    return memory


@functools.cache
def needed(name: str, layers: tuple[int, ...], count: int) -> frozenset[int]:
    """Blocks before `count` with a token that a later query of some layers sees, by the definition of the pattern."""
    queries = np.arange(count * SIZE, count * SIZE + 80)[:, None]
    keys = np.arange(count * SIZE)[None]
    seen = np.any([literal(PATTERNS[name][layer], queries, keys)[0] for layer in layers], axis=(0, 1))
    return frozenset((np.flatnonzero(seen) // SIZE).tolist())


@pytest.mark.parametrize("make_layout", [one_group, lambda patterns: KVLayout(group_layers(patterns), SIZE)])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_beginning_is_usable_if_all_that_later_queries_see_of_it_is_there(name, make_layout):
    layout = make_layout(PATTERNS[name])
    prefixes = memory_of(PATTERNS[name], layout=layout).prefixes
    rng = np.random.default_rng(3)
    sizes = set()
    for _ in range(300):
        there = [rng.random(rng.integers(0, 9)) < rng.choice([0.3, 0.7, 0.95]) for _ in layout.groups]
        present = [set(np.flatnonzero(of_group).tolist()) for of_group in there]
        counts = [
            count
            for count in range(min(map(len, there)) + 1)
            if all(needed(name, group.layers, count) <= of for group, of in zip(layout.groups, present, strict=True))
        ]
        assert prefixes.usable(there) == max(counts)
        sizes.add(max(counts))
    assert len(sizes) > 5


@pytest.mark.parametrize("name", PATTERNS)
def test_a_hit_pins_the_blocks_that_later_queries_see_and_no_others(name):
    memory, layers = memory_of(PATTERNS[name]), tuple(range(len(PATTERNS[name])))
    text = prompt_of(30)
    ids = cache(memory, text)
    hit = pin(memory.prefixes, sequence(text))
    assert hit.num_tokens == 28 and hit.starts == [SIZE * b for b in sorted(needed(name, layers, 7))]
    owned = np.flatnonzero(memory.blocks.ref_count).tolist()
    assert sorted(owned) == sorted(ids[b] for b in needed(name, layers, 7))
    memory.prefixes.unpin(hit)
    check_memory(memory, [])


def test_at_least_one_token_is_left_to_compute():
    memory = memory_of()
    cache(memory, prompt_of(16))
    for length in range(1, 17):
        hit = pin(memory.prefixes, sequence(prompt_of(16)[:length]))
        assert hit.num_tokens == (length - 1) // SIZE * SIZE == SIZE * len(hit.nodes)
        memory.prefixes.unpin(hit)
    check_memory(memory, [])


def test_a_hit_ends_where_the_text_differs():
    memory = memory_of()
    text = prompt_of(20)
    cache(memory, text)
    for at in range(20):
        other = text.copy()
        other[at] += 1
        hit = pin(memory.prefixes, sequence(other))
        assert hit.num_tokens == min(at // SIZE * SIZE, 16)
        memory.prefixes.unpin(hit)


def test_blocks_of_another_pattern_are_refused_from_where_it_hides_something():
    text = prompt_of(24)
    memory = memory_of()
    cache(memory, text)
    found = {}
    for window in (2, 4, 8, 12, 13, 100, None):
        patterns = (AttentionPattern(window=window),)
        memory.set_layout(one_group(patterns), Scope("m", repr(patterns), patterns[0].full_until))
        hit = pin(memory.prefixes, sequence(text))
        found[window] = hit.num_tokens
        memory.prefixes.unpin(hit)
    assert found == {2: 0, 4: 4, 8: 8, 12: 12, 13: 12, 100: 20, None: 20}


def test_a_prompt_that_is_to_be_scored_takes_nothing_from_the_cache():
    memory = memory_of()
    cache(memory, prompt_of(16))
    assert pin(memory.prefixes, sequence(prompt_of(16), prompt_logprobs=0)).num_tokens == 0
    assert pin(memory.prefixes, sequence(prompt_of(16), logprobs=0)).num_tokens == 12


def test_a_claim_gives_blocks_counts_the_use_and_says_what_was_found():
    memory = memory_of()
    ids = cache(memory, prompt_of(14))
    seq = sequence(prompt_of(14))
    hit = pin(memory.prefixes, seq)
    held = claim(memory.prefixes, seq, hit)
    assert held.ids.tolist() == ids and held.starts.tolist() == [0, 4, 8] and held.num_computed == 12
    assert [node.num_uses for node in hit.nodes] == [1, 1, 1] and len({node.last_use for node in hit.nodes}) == 1
    assert (seq.kv.num_cached_tokens, seq.kv.num_indexed, seq.kv.nodes) == (12, 3, {0: hit.nodes[-1]})
    counters = memory.counters
    assert (counters.queried_tokens, counters.hit_tokens, counters.hits_device, counters.hits_host) == (14, 12, 3, 0)
    # After a preemption it is not counted again.
    memory.device.release(held.ids)
    claim(memory.prefixes, seq)
    assert counters.queried_tokens == 14 and seq.kv.num_cached_tokens == 12


def test_a_text_goes_on_from_its_last_block_though_a_window_of_one_token_needs_only_sinks():
    patterns, text = (AttentionPattern(window=1, num_sinks=1),), prompt_of(20)
    memory = memory_of(patterns)
    cache(memory, text[:16])
    seq = sequence(text)
    hit = pin(memory.prefixes, seq)
    assert hit.num_tokens == 16 and hit.starts == [0]
    claim(memory.prefixes, seq, hit)
    [block] = memory.device.allocate(1).tolist()
    memory.prefixes.insert(seq.kv, seq.token_ids, [[block]])
    node = memory.index.nodes[seq.kv.links[0][4].key]
    assert node.depth == 4 and node.parent is memory.index.nodes[seq.kv.links[0][3].key]


def test_content_that_is_cached_already_is_shared_instead_of_kept_twice():
    memory = memory_of()
    ids = cache(memory, prompt_of(12))
    again = sequence(prompt_of(12))
    own = memory.device.allocate(3)
    assert memory.prefixes.insert(again.kv, again.token_ids, [own.tolist()]) == [ids]
    assert memory.blocks.ref_count[ids].tolist() == [1, 1, 1] and len(memory.index) == 3
    memory.device.release(own)
    check_memory(memory, [np.array(ids, np.int32)])


def test_blocks_that_a_row_no_longer_holds_lead_to_those_it_holds():
    patterns = (AttentionPattern(window=4),)
    memory = memory_of(patterns)
    seq, own = sequence(prompt_of(16)), memory.device.allocate(2)
    assert memory.prefixes.insert(seq.kv, seq.token_ids, [[-1, -1, *own.tolist()]]) == [[-1, -1, *own.tolist()]]
    check_memory(memory, [own])
    memory.device.release(own)
    hit = pin(memory.prefixes, sequence(np.append(prompt_of(16), 1)))
    assert hit.num_tokens == 16 and [node.at[DEVICE] for node in hit.nodes] == own.tolist()[1:]


def test_inserting_nothing_that_is_held_leaves_no_trace():
    memory = memory_of((AttentionPattern(window=1),))
    seq = sequence(prompt_of(16))
    memory.prefixes.insert(seq.kv, seq.token_ids, [[-1, -1, -1]])
    assert len(memory.index) == 0 and seq.kv.num_indexed == 3
    [block] = memory.device.allocate(1).tolist()
    memory.prefixes.insert(seq.kv, seq.token_ids, [[block]])  # the fourth block, whose parents are known no longer
    assert len(memory.index) == 4 and memory.index.nodes[seq.kv.links[0][3].key].at[DEVICE] == block
    check_memory(memory, [np.array([block], np.int32)])


def test_who_needs_a_block_that_is_just_being_computed_awaits_it():
    memory = memory_of()
    first, second = sequence(prompt_of(12)), sequence(prompt_of(12))
    memory.prefixes.expect(first.kv, first.token_ids)
    assert pin(memory.prefixes, second).awaits
    assert not pin(memory.prefixes, first).awaits  # after a preemption it waits not for itself
    assert not pin(memory.prefixes, sequence(prompt_of(12), salt="other")).awaits
    memory.prefixes.insert(first.kv, first.token_ids, [memory.device.allocate(2).tolist()])
    hit = pin(memory.prefixes, second)
    assert not hit.awaits and hit.num_tokens == 8
    memory.prefixes.expect_no_more(first.kv)
    assert not memory.prefixes._computing


def test_a_longer_prompt_awaits_one_block_after_the_other():
    memory, text = memory_of(), prompt_of(17)
    first, second = sequence(text[:16]), sequence(text)
    memory.prefixes.expect(first.kv, first.token_ids)
    for _ in range(4):
        assert pin(memory.prefixes, second).awaits
        memory.prefixes.insert(first.kv, first.token_ids, [memory.device.allocate(1).tolist()])
    hit = pin(memory.prefixes, second)
    assert not hit.awaits and hit.num_tokens == 16
    assert not memory.prefixes._computing  # nothing is left to wait for


def test_one_of_two_that_compute_the_same_goes_on_to_what_is_its_own():
    memory, text = memory_of(), prompt_of(13)
    first, second = sequence(text[:4]), sequence(text[:12])
    memory.prefixes.expect(first.kv, first.token_ids)
    memory.prefixes.expect(second.kv, second.token_ids)  # there was no time to wait
    memory.prefixes.expect_no_more(first.kv)
    memory.prefixes.insert(second.kv, second.token_ids, [memory.device.allocate(1).tolist()])
    assert pin(memory.prefixes, sequence(text)).awaits
    memory.prefixes.expect_no_more(second.kv)
    assert not memory.prefixes._computing


def test_an_unknown_prompt_is_hashed_up_to_its_first_block(monkeypatch):
    memory, seq = memory_of(), sequence(prompt_of(64))
    asked = []
    link = memory.index.link
    monkeypatch.setattr(memory.index, "link", lambda *given: asked.append(given) or link(*given))
    assert not pin(memory.prefixes, seq).num_tokens
    memory.prefixes.expect(seq.kv, seq.token_ids)
    assert len(seq.kv.links[0]) == len(asked) == 1
    memory.prefixes.insert(seq.kv, seq.token_ids, [memory.device.allocate(16).tolist()])
    assert len(seq.kv.links[0]) == len(asked) == 16
    again = sequence(prompt_of(64))
    assert pin(memory.prefixes, again).num_tokens == 60
    assert len(again.kv.links[0]) == 15 and len(asked) == 16 + 15


def test_nobody_awaits_what_has_left():
    memory = memory_of()
    first, second = sequence(prompt_of(12)), sequence(prompt_of(12))
    memory.prefixes.expect(first.kv, first.token_ids)
    memory.prefixes.expect_no_more(first.kv)
    assert not pin(memory.prefixes, second).awaits


def test_the_last_block_of_a_prompt_is_not_awaited():
    """A prompt of 8 tokens takes over one block of two at most."""
    memory = memory_of()
    first, second = sequence(prompt_of(8)), sequence(prompt_of(8))
    memory.prefixes.insert(first.kv, first.token_ids, [memory.device.allocate(1).tolist()])
    memory.prefixes.expect(first.kv, first.token_ids)
    hit = pin(memory.prefixes, second)
    assert not hit.awaits and hit.num_tokens == 4


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat():
    engine = make_engine(caching=True, num_blocks=32)
    first = engine.add_request(prompt_of(6), asking(11))
    run(engine)
    answer = first.output().outputs[0].token_ids
    turn = np.concatenate([prompt_of(6), answer, prompt_of(3)]).astype(np.int32)
    second = engine.add_request(turn, asking(4))
    run(engine)
    # The last token of the answer was never computed: of 17, four full blocks are.
    assert second.output().num_cached_tokens == 16
    assert second.output().outputs[0].token_ids == reference_tokens(turn, 4, two_layers(FULL))


@pytest.mark.parametrize("name", PATTERNS)
def test_texts_from_the_cache_are_those_without_it(name):
    patterns = PATTERNS[name]
    engine = make_engine(patterns, caching=True, num_blocks=24, host_slots=6)
    requests = []
    for seed, length in ((0, 9), (0, 17), (1, 17), (0, 22), (1, 6), (1, 30), (0, 30)):
        text = np.concatenate([prompt_of(12)[: min(length, 12)], prompt_of(30, seed)[: max(length - 12, 0)]])
        requests.append(engine.add_request(text.astype(np.int32), asking(7)))
        step(engine)
        step(engine)
    run(engine)
    assert engine.memory.counters.hit_tokens > 30
    for request in requests:
        expected = reference_tokens(request.prompt_token_ids, 7, patterns)
        assert request.output().outputs[0].token_ids == expected


def test_without_caching_nothing_is_kept():
    engine = make_engine(caching=False)
    for _ in range(2):
        request = engine.add_request(prompt_of(13), asking(5))
        run(engine)
        assert request.output().num_cached_tokens == 0
    assert len(engine.memory.index) == 0 and engine.scheduler.blocks.num_idle == 0
    assert engine.scheduler.blocks.num_free == engine.scheduler.blocks.num_blocks
