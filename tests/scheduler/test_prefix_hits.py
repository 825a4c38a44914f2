"""Cached blocks that requests find: kept between look-up and use, never stale, of one text and one salt."""

import numpy as np
import pytest

from ksana_jax.core.request import FinishReason
from ksana_jax.kv.prefix_index import sha256
from tests.expected import expect_reference
from tests.fakes import FULLY, SINKS, make_engine, prompt_of, run, step
from tests.kv.prefixes import pin
from tests.scheduler.requests import add, expect_empty


@pytest.mark.parametrize("hit_first", [True, False])
@pytest.mark.parametrize("num_blocks", [5, 6, 7, 8])
def test_an_ownerless_cached_block_that_one_request_has_found_is_not_taken_by_another_of_the_same_step(
    hit_first, num_blocks
):
    engine = make_engine(num_blocks=num_blocks, max_num_batched_tokens=64, caching=True)
    cached, stranger = prompt_of(13), prompt_of(16, seed=1)
    requests = [add(engine, cached, 1)]
    run(engine)
    assert engine.scheduler.blocks.num_idle == 3
    # Three blocks are found and one is new; the other needs four: below 8 blocks one of them waits.
    pair = [cached, stranger] if hit_first else [stranger, cached]
    requests += [add(engine, prompt, 1) for prompt in pair]
    run(engine)
    found = requests[1 if hit_first else 2].output().num_cached_tokens
    # Coming first, the other takes four free blocks, or evicts where there are fewer beside the three that are kept.
    assert (found == 12) == (hit_first or num_blocks >= 7)
    expect_reference(requests)
    expect_empty(engine)


def test_a_found_block_stays_though_all_others_are_taken():
    engine = make_engine(num_blocks=6, caching=True)
    add(engine, 13, 1)
    run(engine)
    memory, request = engine.memory, add(engine, 13, 1)
    hit = pin(memory.prefixes, request.completions[0].seq)
    found = [node.at[0] for node in hit.nodes]
    assert len(found) == 3 and memory.device.pool.num_available == 3
    taken = memory.device.allocate(3)
    assert not set(taken.tolist()) & set(found)
    assert [node.at[0] for node in hit.nodes] == found


def test_a_preempted_sequence_with_output_is_found_again_up_to_its_last_full_block():
    # Class of bug: prefill inferred from "no output yet".
    engine = make_engine(num_blocks=12, caching=True, max_num_batched_tokens=8)
    old, new = add(engine, 8, 30), add(engine, 7, 24, seed=1)
    seq = new.completions[0].seq
    while not seq.num_preemptions:
        step(engine)
    preempted_at = len(seq.token_ids)
    assert preempted_at > seq.num_prompt + 4
    run(engine)
    expect_reference([old, new])
    expect_empty(engine)


@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12, 16])
def test_a_prompt_that_is_cached_whole_still_computes_a_token(patterns, length):
    # Class of bug: a zero-length query.
    engine = make_engine(patterns, caching=True)
    requests = [add(engine, length, 8)]
    run(engine)
    requests += [add(engine, length, 8) for _ in range(3)]
    while engine.has_work:
        batch = len(engine.records)
        step(engine)
        assert len(engine.records) > batch and engine.records[-1].num_tokens >= 1
    assert requests[-1].output().num_cached_tokens == (length - 1) // 4 * 4
    expect_reference(requests, patterns)


def test_a_block_that_is_used_again_is_no_longer_found_by_what_it_held():
    # Class of bug: a stale hash survives the reuse of its block.
    engine = make_engine(num_blocks=4, max_num_seqs=1, caching=True)
    requests = []
    for seed in (1, 2, 1, 3, 1, 2):
        requests.append(add(engine, 13, 3, seed=seed))
        run(engine)
        assert requests[-1].output().num_cached_tokens == 0
    expect_reference(requests)
    again = add(engine, 13, 3, seed=2)
    run(engine)
    assert again.output().num_cached_tokens == 12
    expect_reference([again])


@pytest.mark.parametrize("num_blocks", [6, 7, 8, 9])
@pytest.mark.parametrize("budget", [4, 9, 64])
def test_room_is_reckoned_with_what_a_hit_has_changed(num_blocks, budget):
    # Class of bug: state that was read before a prefix hit changes it. Found blocks are no longer to be evicted.
    engine = make_engine(num_blocks=num_blocks, caching=True, max_num_batched_tokens=budget)
    requests = [add(engine, 13, 1)]
    run(engine)
    texts = [(17, 0), (13, 0), (13, 1), (17, 0)]  # of one length, seeds share nothing; 13 and 17 differ too
    requests += [add(engine, np.concatenate([prompt_of(13)[:8], prompt_of(n, s)[:9]]), 6) for n, s in texts]
    run(engine)
    assert any(r.output().num_cached_tokens for r in requests[1:])
    expect_reference(requests)
    expect_empty(engine)


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_hash_collision_is_a_miss(num_bytes):
    engine = make_engine(caching=True, digest=lambda data: sha256(data)[:num_bytes])
    requests = []
    for seed in range(40):
        requests.append(add(engine, 13, 2, seed=seed))
        run(engine)
        # Nothing that stands at another place or behind another text: these share none.
        assert requests[-1].output().num_cached_tokens == 0
    expect_reference(requests)
    keys = engine.memory.index.nodes
    assert 1 <= len(keys) <= 256**num_bytes


def test_a_text_whose_key_is_taken_goes_on_uncached_and_alone():
    engine = make_engine(caching=True, digest=lambda data: b"")
    requests = [add(engine, 13, 9, n=2, seed=seed) for seed in range(4)]
    run(engine)
    expect_reference(requests)
    expect_empty(engine)


def test_different_salts_never_hit_and_equal_salts_do():
    engine = make_engine(caching=True, host_slots=8)
    cached = {}
    for salt in ("", "a", "b", "", "a", "aa", "b"):
        request = add(engine, 13, 2, salt=salt)
        run(engine)
        expect_reference([request])
        cached.setdefault(salt, []).append(request.output().num_cached_tokens)
    assert cached == {"": [0, 12], "a": [0, 12], "b": [0, 12], "aa": [0]}


def test_a_request_does_not_wait_for_the_same_text_of_another_salt():
    engine = make_engine(caching=True, max_num_batched_tokens=64)
    requests = [add(engine, 13, 2, salt=salt) for salt in ("a", "b", "a")]
    step(engine)
    seqs = [r.completions[0].seq for r in requests]
    assert [seq.row is not None for seq in seqs] == [True, True, False]
    run(engine)
    assert [r.output().num_cached_tokens for r in requests] == [0, 0, 12]


def test_who_waits_for_a_prefix_goes_on_when_the_one_that_computes_it_is_aborted():
    engine = make_engine(caching=True, max_num_batched_tokens=4)
    first, second = add(engine, 21), add(engine, 21)
    step(engine)
    assert second.completions[0].seq.row is None
    engine.abort(first.request_id)
    run(engine)
    assert first.output().outputs[0].finish_reason is FinishReason.ABORT
    expect_reference([second])
    expect_empty(engine)


def test_who_waits_for_a_prefix_lets_others_pass():
    engine = make_engine(caching=True, max_num_batched_tokens=8)
    first, same, other = add(engine, 33), add(engine, 33), add(engine, 3, seed=1)
    while not other.finished:
        step(engine)
        if first.completions[0].seq.row is not None and engine.scheduler.rows.num_computed[0] < 32:
            assert same.completions[0].seq.row is None
    run(engine)
    assert same.output().num_cached_tokens == 32
    expect_reference([first, same, other])


def test_an_executor_that_fails_leaves_no_cached_block_that_was_never_computed():
    engine = make_engine(caching=True, host_slots=6, num_blocks=8)
    run_first = add(engine, 13, 2)
    run(engine)
    execute, engine.executor.submit = engine.executor.submit, lambda step: 1 / 0
    add(engine, 29, 2, seed=1)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.executor.submit = execute
    engine.executor.scramble(np.ones(8, bool))  # an executor that failed has an empty pool
    expect_empty(engine)
    requests = [add(engine, 13, 2), add(engine, 29, 2, seed=1)]
    run(engine)
    expect_reference([run_first, *requests])
