"""Bugs that paged engines have had, each made again here: prefix caches, tiers, reference counts, preemption."""

import itertools

import numpy as np
import pytest

from ksana_jax.kv.prefix_index import sha256
from ksana_jax.patterns import AttentionPattern
from ksana_jax.request import FinishReason
from tests.expected import expect_reference
from tests.fakes import FULLY, FakeExecutor, asking, make_engine, prompt_of, reference_tokens, run, step, two_layers
from tests.kv.disk.double import DiskDouble
from tests.kv.prefixes import pin

SINKS = two_layers(AttentionPattern(window=6, num_sinks=2))
NEVER_LATE = {"read_timeout_s": 1e9}


def add(engine, prompt, max_tokens: int = 6, salt: str = "", **settings):
    return engine.add_request(np.asarray(prompt, np.int32), asking(max_tokens, **settings), cache_salt=salt)


def expect_empty(engine) -> None:
    """Nobody owns anything: on the device, on the host, or among the waiting."""
    engine.step()  # late reads that have ended
    engine.scheduler.check()
    memory = engine.memory
    assert not engine.has_work and not engine.requests
    assert not memory.blocks.ref_count.any() and memory.blocks.num_used == 0
    if memory.host is not None:
        assert not memory.host.pool.ref_count.any()


def filled_disk(prompts, **settings) -> DiskDouble:
    """A disk that an engine before this one has filled with the blocks of some prompts."""
    disk = DiskDouble()
    engine = make_engine(caching=True, host_slots=64, write="through", disk=disk, **settings)
    for prompt in prompts:
        add(engine, prompt, 1)
    run(engine)
    return disk


# ------------------------------------------------------------------ between look-up and use (vLLM, issue 37164)


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
    add(engine, prompt_of(13), 1)
    run(engine)
    memory, request = engine.memory, add(engine, prompt_of(13), 1)
    hit = pin(memory.prefixes, request.completions[0].seq)
    found = [node.at[0] for node in hit.nodes]
    assert len(found) == 3 and memory.device.num_available == 3
    taken = memory.device.allocate(3)
    assert not set(taken.tolist()) & set(found)
    assert [node.at[0] for node in hit.nodes] == found


# ------------------------------------------------------------------ tiers and pressure (vLLM, issue 45388)


@pytest.mark.parametrize("resolve", ["at once", "late", "never", "with nothing"])
@pytest.mark.parametrize("host_slots", [4, 5, 7, 9])
def test_requests_that_each_fit_alone_do_not_lock_each_other_out_of_the_host(resolve, host_slots):
    prompts = [prompt_of(17, seed=s) for s in range(4)]
    disk = filled_disk(prompts)
    timeout = 30 if resolve == "never" else 1e9
    engine = make_engine(num_blocks=7, caching=True, host_slots=host_slots, disk=disk, read_timeout_s=timeout)
    requests = [add(engine, prompt) for prompt in prompts]
    for turn in itertools.count():
        if not engine.has_work:
            break
        assert turn < 400, "no progress"
        step(engine)
        if resolve == "at once" or (resolve == "late" and turn % 5 == 4):
            disk.end_all()
        elif resolve == "with nothing":
            disk.end_all(found=False)
    expect_reference(requests)
    disk.end_all()
    expect_empty(engine)
    asked = [asked.key for asked in disk.asked]
    # Four blocks each or none: no text is read in part.
    assert asked and len(asked) % 4 == 0 and len(set(asked)) == len(asked)


def test_a_request_that_gets_no_slots_for_its_reads_computes_while_another_waits_for_its_own():
    prompts = [prompt_of(17, seed=s) for s in range(2)]
    disk = filled_disk(prompts)
    engine = make_engine(caching=True, host_slots=7, disk=disk, **NEVER_LATE)
    requests = [add(engine, prompt) for prompt in prompts]
    while not requests[1].finished:
        step(engine)
    assert len(disk.asked) == 4 and requests[0].completions[0].seq.row is None
    disk.end_all()
    run(engine)
    assert [r.output().num_cached_tokens for r in requests] == [16, 0]
    assert engine.memory.counters.hits_disk == 4
    expect_reference(requests)
    expect_empty(engine)


@pytest.mark.parametrize("preempt", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks"])
@pytest.mark.parametrize("slack", [0, 1])
def test_a_pool_below_the_sum_of_the_working_sets_makes_progress_with_all_tiers_on(preempt, patterns, slack):
    shared = prompt_of(9)
    prompts = [np.concatenate([shared, prompt_of(5, seed=s)]) for s in range(5)]
    alone = make_engine(patterns).scheduler.blocks_to_finish(14 + 12)
    engine = make_engine(
        patterns,
        num_blocks=alone + slack,
        caching=True,
        host_slots=alone,
        preempt=preempt,
        disk=DiskDouble(True),
        write="back",
    )
    requests = [add(engine, prompt, 12) for prompt in prompts for _ in range(2)]
    run(engine, max_steps=800)
    assert engine.scheduler.num_preemptions > 0 or patterns is SINKS  # whose rows stop growing
    assert engine.memory.counters.replaced and engine.memory.counters.saved
    expect_reference(requests, patterns)
    expect_empty(engine)


# ------------------------------------------------------------------ aborts while a tier is asked


def waiting_for_disk(**settings):
    """An engine, its disk, and a request that waits for four blocks of it."""
    prompt = prompt_of(17)
    disk = filled_disk([prompt])
    engine = make_engine(caching=True, host_slots=8, disk=disk, **(NEVER_LATE | settings))
    request = add(engine, prompt)
    step(engine)
    assert len(disk.asked) == 4 and engine.has_work
    return engine, disk, request


@pytest.mark.parametrize("found", [True, False])
def test_after_an_abort_a_late_read_gives_its_slot_back_and_writes_to_nobody(found):
    engine, disk, request = waiting_for_disk()
    engine.abort(request.request_id)
    engine.scheduler.check()
    assert request.finished and not engine.has_work and engine.memory.blocks.num_used == 0
    # Slots that are still written to are nobody else's until the reads end.
    late = engine.memory.host.pool.num_used
    assert late == 4
    others = [add(engine, prompt_of(17, seed=s)) for s in range(3)]
    step(engine)
    disk.end_all(found)
    run(engine)
    expect_reference(others)
    expect_empty(engine)


def test_after_an_abort_a_read_that_never_ends_costs_its_slot_and_nothing_else():
    engine, _, request = waiting_for_disk()
    engine.abort(request.request_id)
    others = [add(engine, prompt_of(17, seed=s)) for s in range(1, 4)]
    run(engine)
    expect_reference(others)
    assert engine.memory.blocks.num_used == 0 and engine.memory.host.pool.num_used == 4


def test_a_read_ends_once_and_its_slot_is_given_back_once():
    engine, disk, request = waiting_for_disk()
    engine.abort(request.request_id)
    disk.end_all()
    for _ in range(3):
        engine.step()
        engine.scheduler.check()
    engine.abort(request.request_id)
    expect_empty(engine)


@pytest.mark.parametrize("leaves", [0, 1])
def test_two_requests_that_ask_for_the_same_blocks_read_them_once_and_either_may_leave(leaves):
    engine, disk, first = waiting_for_disk()
    second = add(engine, first.prompt_token_ids)
    step(engine)
    assert len(disk.asked) == 4, "asked twice"
    requests = [first, second]
    engine.abort(requests.pop(leaves).request_id)
    step(engine)
    assert len(disk.asked) == (4 if leaves else 8)  # whoever waited for the reads of one that left asks itself
    disk.end_all()
    run(engine)
    assert requests[0].output().num_cached_tokens == 16
    expect_reference(requests)
    expect_empty(engine)


def test_a_request_does_not_wait_for_a_slow_disk_longer_than_the_timeout():
    engine, disk, request = waiting_for_disk(read_timeout_s=20)
    run(engine, max_steps=40)
    assert request.output().num_cached_tokens == 0
    expect_reference([request])
    disk.end_all()
    expect_empty(engine)


def test_of_a_load_in_part_late_what_was_read_in_time_is_used():
    engine, disk, request = waiting_for_disk(read_timeout_s=20)
    disk.end(disk.asked[0])
    disk.end(disk.asked[1])
    run(engine, max_steps=40)
    assert request.output().num_cached_tokens == 8
    expect_reference([request])
    disk.end_all()
    expect_empty(engine)


@pytest.mark.parametrize("failing", range(4))
def test_a_block_that_cannot_be_read_is_computed(failing):
    engine, disk, request = waiting_for_disk()
    for place, asked in enumerate(disk.asked):
        disk.end(asked, found=place != failing)
    run(engine)
    assert request.output().num_cached_tokens == 4 * failing
    expect_reference([request])
    expect_empty(engine)


# ------------------------------------------------------------------ reference counts (xLLM, issue 828)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_the_last_owner_frees_what_many_have_shared(caching, num_blocks):
    engine = make_engine(num_blocks=num_blocks, caching=caching, max_num_seqs=6)
    requests = [add(engine, prompt_of(length), 9, n=n) for n, length in ((4, 11), (1, 11), (3, 8), (2, 17))]
    usages = []
    while engine.has_work:
        step(engine)
        last = engine.records[-1]
        usages.append(max(last.blocks_in_use, last.peak_blocks) / num_blocks)
        assert last.cached_blocks + last.blocks_in_use <= num_blocks
    assert 0 < max(usages) <= 1
    expect_reference(requests)
    expect_empty(engine)


def test_shared_blocks_count_once_beside_what_they_would_be_unshared():
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=64)
    add(engine, prompt_of(16), 4, n=4, temperature=1)
    run(engine)
    # Three full blocks of the prompt in common, then one block each for its end and a token.
    both = [(r.peak_blocks, r.unshared_blocks) for r in engine.records if r.num_running == 4]
    assert (3 + 4 + 4, 20) in both and max(engine.records, key=lambda r: r.peak_blocks).peak_blocks == 11


# ------------------------------------------------------------------ nano-vllm's five, with the cache on


def test_a_preempted_sequence_with_output_is_found_again_up_to_its_last_full_block():
    # Class of bug: prefill inferred from "no output yet".
    engine = make_engine(num_blocks=12, caching=True, max_num_batched_tokens=8)
    old, new = add(engine, prompt_of(8), 30), add(engine, prompt_of(7, seed=1), 24)
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
    requests = [add(engine, prompt_of(length), 8)]
    run(engine)
    requests += [add(engine, prompt_of(length), 8) for _ in range(3)]
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
        requests.append(add(engine, prompt_of(13, seed), 3))
        run(engine)
        assert requests[-1].output().num_cached_tokens == 0
    expect_reference(requests)
    again = add(engine, prompt_of(13, 2), 3)
    run(engine)
    assert again.output().num_cached_tokens == 12
    expect_reference([again])


@pytest.mark.parametrize("num_blocks", [6, 7, 8, 9])
@pytest.mark.parametrize("budget", [4, 9, 64])
def test_room_is_reckoned_with_what_a_hit_has_changed(num_blocks, budget):
    # Class of bug: state that was read before a prefix hit changes it. Found blocks are no longer to be evicted.
    engine = make_engine(num_blocks=num_blocks, caching=True, max_num_batched_tokens=budget)
    requests = [add(engine, prompt_of(13), 1)]
    run(engine)
    texts = [(17, 0), (13, 0), (13, 1), (17, 0)]  # of one length, seeds share nothing; 13 and 17 differ too
    requests += [add(engine, np.concatenate([prompt_of(13)[:8], prompt_of(n, s)[:9]]), 6) for n, s in texts]
    run(engine)
    assert any(r.output().num_cached_tokens for r in requests[1:])
    expect_reference(requests)
    expect_empty(engine)


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_no_token_is_dropped_when_a_text_is_computed_again(preempt):
    # Class of bug: the token that a second prefill ends with is dropped.
    engine = make_engine(num_blocks=7, caching=True, host_slots=8, preempt=preempt, max_num_seqs=3)
    requests = [add(engine, prompt_of(5, seed=s), 16) for s in range(3)]
    run(engine)
    assert any(r.metrics.num_preemptions for r in requests)
    assert bool(engine.memory.counters.swapped_in) == (preempt == "swap")
    assert all(len(r.output().outputs[0].token_ids) == 16 for r in requests)
    expect_reference(requests)


# ------------------------------------------------------------------ collisions and salts


@pytest.mark.parametrize("num_bytes", [0, 1])
def test_a_hash_collision_is_a_miss(num_bytes):
    engine = make_engine(caching=True, digest=lambda data: sha256(data)[:num_bytes])
    requests = []
    for seed in range(40):
        requests.append(add(engine, prompt_of(13, seed), 2))
        run(engine)
        # Nothing that stands at another place or behind another text: these share none.
        assert requests[-1].output().num_cached_tokens == 0
    expect_reference(requests)
    keys = engine.memory.index.nodes
    assert 1 <= len(keys) <= 256**num_bytes


def test_a_text_whose_key_is_taken_goes_on_uncached_and_alone():
    engine = make_engine(caching=True, digest=lambda data: b"")
    requests = [add(engine, prompt_of(13, seed), 9, n=2) for seed in range(4)]
    run(engine)
    expect_reference(requests)
    expect_empty(engine)


def test_different_salts_never_hit_and_equal_salts_do():
    engine = make_engine(caching=True, host_slots=8)
    cached = {}
    for salt in ("", "a", "b", "", "a", "aa", "b"):
        request = add(engine, prompt_of(13), 2, salt)
        run(engine)
        expect_reference([request])
        cached.setdefault(salt, []).append(request.output().num_cached_tokens)
    assert cached == {"": [0, 12], "a": [0, 12], "b": [0, 12], "aa": [0]}


def test_a_request_does_not_wait_for_the_same_text_of_another_salt():
    engine = make_engine(caching=True, max_num_batched_tokens=64)
    requests = [add(engine, prompt_of(13), 2, salt) for salt in ("a", "b", "a")]
    step(engine)
    seqs = [r.completions[0].seq for r in requests]
    assert [seq.row is not None for seq in seqs] == [True, True, False]
    run(engine)
    assert [r.output().num_cached_tokens for r in requests] == [0, 0, 12]


# ------------------------------------------------------------------ waiting for each other


def test_who_waits_for_a_prefix_goes_on_when_the_one_that_computes_it_is_aborted():
    engine = make_engine(caching=True, max_num_batched_tokens=4)
    first, second = add(engine, prompt_of(21)), add(engine, prompt_of(21))
    step(engine)
    assert second.completions[0].seq.row is None
    engine.abort(first.request_id)
    run(engine)
    assert first.output().outputs[0].finish_reason is FinishReason.ABORT
    expect_reference([second])
    expect_empty(engine)


def test_who_waits_for_a_prefix_lets_others_pass():
    engine = make_engine(caching=True, max_num_batched_tokens=8)
    first, same, other = add(engine, prompt_of(33)), add(engine, prompt_of(33)), add(engine, prompt_of(3, seed=1))
    while not other.finished:
        step(engine)
        if first.completions[0].seq.row is not None and engine.scheduler.rows.num_computed[0] < 32:
            assert same.completions[0].seq.row is None
    run(engine)
    assert same.output().num_cached_tokens == 32
    expect_reference([first, same, other])


@pytest.mark.parametrize("leader_goes", [True, False])
def test_completions_whose_leader_ends_before_its_prompt_is_computed_still_run_or_end(leader_goes):
    engine = make_engine(caching=True, max_num_batched_tokens=4)
    request = add(engine, prompt_of(14), 5, n=3)
    step(engine)
    seqs = [c.seq for c in request.completions]
    if leader_goes:
        engine.scheduler.finish(seqs[0], FinishReason.ABORT)
        run(engine)
        expected = reference_tokens(prompt_of(14), 5, FULLY)
        assert [c.token_ids for c in request.output().outputs] == [[], expected, expected]
    else:
        engine.abort(request.request_id)
    assert all(seq.finish_reason is not None for seq in seqs)
    expect_empty(engine)


def test_moves_that_fail_while_all_wait_for_the_disk_end_all_requests(monkeypatch):
    engine, disk, request = waiting_for_disk(preempt="swap")
    monkeypatch.setattr(engine.memory.disk_reads, "wait", lambda: None)
    other = add(engine, prompt_of(9, seed=5), 20)
    step(engine)
    engine.scheduler._preempt(int(engine.scheduler.order[0]))  # as a row that must make room
    assert engine.scheduler.waiting[-1][2].kv.swapped is not None
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: None)

    def fail(moves):
        raise FakeExecutor.Failed("as told")

    monkeypatch.setattr(engine.executor, "move", fail)
    with pytest.raises(FakeExecutor.Failed):
        engine.step()
    monkeypatch.undo()
    assert request.finished and other.finished and not engine.has_work
    disk.end_all()
    engine.memory.disk_reads.poll()
    engine.scheduler.check()
    expect_empty(engine)


def test_an_executor_that_fails_leaves_no_cached_block_that_was_never_computed():
    engine = make_engine(caching=True, host_slots=6, num_blocks=8)
    run_first = add(engine, prompt_of(13), 2)
    run(engine)
    execute, engine.executor.submit = engine.executor.submit, lambda step: 1 / 0
    add(engine, prompt_of(29, seed=1), 2)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.executor.submit = execute
    engine.executor.scramble(np.ones(8, bool))  # an executor that failed has an empty pool
    expect_empty(engine)
    requests = [add(engine, prompt_of(13), 2), add(engine, prompt_of(29, seed=1), 2)]
    run(engine)
    expect_reference([run_first, *requests])
