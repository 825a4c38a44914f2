"""Requests that wait for blocks on disk: reads end late, in part, never or after the request, and slots are few."""

import itertools

import numpy as np
import pytest

from tests.expected import expect_reference
from tests.fakes import FULLY, SINKS, FakeExecutor, make_engine, prompt_of, run, step
from tests.kv.disk.double import DiskDouble
from tests.scheduler.requests import add, expect_empty

NEVER_LATE = {"read_timeout_s": 1e9}


def filled_disk(prompts, **settings) -> DiskDouble:
    """A disk that an engine before this one has filled with the blocks of some prompts."""
    disk = DiskDouble()
    engine = make_engine(caching=True, host_slots=64, write="through", disk=disk, **settings)
    for prompt in prompts:
        add(engine, prompt, 1)
    run(engine)
    return disk


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
    alone = make_engine(patterns).scheduler.layout.blocks_to_finish(14 + 12, 14)
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
    others = [add(engine, 17, seed=s) for s in range(3)]
    step(engine)
    disk.end_all(found)
    run(engine)
    expect_reference(others)
    expect_empty(engine)


def test_after_an_abort_a_read_that_never_ends_costs_its_slot_and_nothing_else():
    engine, _, request = waiting_for_disk()
    engine.abort(request.request_id)
    others = [add(engine, 17, seed=s) for s in range(1, 4)]
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


def test_moves_that_fail_while_all_wait_for_the_disk_end_all_requests(monkeypatch):
    engine, disk, request = waiting_for_disk(preempt="swap")
    monkeypatch.setattr(engine.memory.disk_reads, "wait", lambda: None)
    other = add(engine, 9, 20, seed=5)
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
