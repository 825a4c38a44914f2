"""Times and sizes in the record of a step."""

import itertools

import numpy as np

from tests.fakes import asking, make_engine, prompt_of


def test_the_host_is_timed_from_one_record_to_the_next_submission_and_from_the_result_to_the_record():
    engine = make_engine()
    engine.clock = itertools.count(0.0, 1.0).__next__
    engine.add_request(prompt_of(6), asking(3, ignore_eos=True))  # arrives at 0
    while engine.has_work:
        engine.step()
    # Each step looks at the clock when it is called if the engine was idle, when it is submitted, when its result
    # comes, and when it is recorded.
    times = [(r.schedule_s, r.began_s, r.ended_s, r.report_s) for r in engine.records]
    assert times == [(1.0, 2.0, 3.0, 1.0), (1.0, 5.0, 6.0, 1.0), (1.0, 8.0, 9.0, 1.0)]


def test_an_idle_engine_does_not_count_as_a_busy_host():
    engine = make_engine()
    times = iter([0.0, 0.0, 1.0, 2.0, 3.0, 50.0, 100.0, 101.0, 102.0, 103.0])
    engine.clock = lambda: next(times)
    for name in "ab":
        engine.add_request(prompt_of(6), asking(1), request_id=name)
        engine.step()
    assert [r.schedule_s for r in engine.records] == [1.0, 1.0]


def test_a_step_is_described_by_its_shape_and_what_its_tokens_see():
    engine = make_engine(block_size=4, max_num_batched_tokens=16, query_tile=4)
    for count in (6, 3):
        engine.add_request(prompt_of(count), asking(3, ignore_eos=True))
    while engine.has_work:
        engine.step()
    first, second, third = engine.records
    assert (first.num_chunks, first.num_attended) == (2, sum(range(1, 7)) + sum(range(1, 4)))
    assert (second.num_chunks, second.num_attended) == (0, 7 + 4)
    assert third.num_attended == 8 + 5
    assert [r.shape for r in engine.records] == [step.shape for step in engine.executor.steps]
    assert [r.num_sampled for r in engine.records] == [2, 2, 2]
    assert not any(r.compiled for r in engine.records)


def test_moved_blocks_are_counted_by_direction():
    engine = make_engine(num_blocks=8, host_slots=20, preempt="swap", max_num_seqs=2, num_scheduler_steps=1)
    for i in range(2):
        engine.add_request(prompt_of(8, i), asking(16, ignore_eos=True))
    while engine.has_work:
        engine.step()
    counters = engine.memory.counters
    records = engine.records
    assert counters.saved and sum(r.num_saved for r in records) == counters.saved
    assert sum(r.num_loaded for r in records) == counters.loaded
    assert np.all([r.num_copied == 0 for r in records])
