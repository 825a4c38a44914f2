"""A recorded engine serves as before; its steps are timed by phase, with their real and padded sizes."""

import gc
import itertools
import weakref

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.engine import build
from ksana_jax.lab.trace import tracing
from ksana_jax.lab.trace.recorder import Recorder
from ksana_jax.lab.trace.steps import PHASES
from ksana_jax.lab.trace.summary import summary
from ksana_jax.runner import compiling
from tests.fakes import asking, make_engine, prompt_of, run, step

SETTINGS = {"num_blocks": 12, "host_slots": 8, "caching": True, "preempt": "swap", "max_model_len": 40}


def busy(engine):
    return [engine.add_request(prompt_of(9 + i, i % 3), asking(12), request_id=f"r{i}") for i in range(5)]


def tokens(requests):
    return [c.token_ids for r in requests for c in r.completions]


def test_a_recorded_engine_gives_the_same_tokens_and_is_left_as_it_was(tmp_path):
    plain = make_engine(**SETTINGS)
    expected = busy(plain)
    run(plain)
    with tracing(tmp_path, profile_steps=0) as trace:
        engine = make_engine(**SETTINGS)
        requests = busy(engine)
        for _ in range(4):
            step(engine)
        assert "_schedule" in vars(engine.scheduler)
    run(engine)
    assert tokens(requests) == tokens(expected)
    assert len(trace.recorders[0].steps) == 4  # nothing is seen after the end
    assert not ({"_schedule", "submit", "reset", "new_requests"} & {*vars(engine.scheduler), *vars(engine.executor)})
    assert "new_requests" not in vars(engine.factory) and not engine.observers
    assert build.observers == [] and compiling.observers == []


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_have_the_numbers_of_the_engines_records_and_what_the_executor_was_given(tmp_path, ahead):
    with tracing(tmp_path, profile_steps=0) as trace:
        # With a tier on the host, the engine waits for the tokens of each step.
        engine = make_engine(**SETTINGS | {"async_scheduling": ahead, "host_slots": 0 if ahead else 8})
        busy(engine)
        run(engine)
    steps, given = trace.recorders[0].steps, engine.executor.steps
    assert [s.record for s in steps] == engine.records
    assert [s.record.shape for s in steps] == [g.shape for g in given]
    assert [s.record.shape.num_tokens for s in steps] == [len(g.arrays.tokens) for g in given]
    assert [s.record.num_tokens for s in steps] == [int((g.arrays.positions >= 0).sum()) for g in given]
    blocks = [0 if g.moves is None else len(g.moves.saves) + len(g.moves.copies) + len(g.moves.loads) for g in given]
    assert [sum(s.moved_bytes.values()) for s in steps] == [n * engine.memory.layout.block_bytes for n in blocks]
    assert ahead or sum(blocks) > 0


def test_phases_add_up_to_the_step_on_a_clock_that_ticks(tmp_path):
    with tracing(tmp_path, profile_steps=0) as trace:
        engine = make_engine(**SETTINGS)
        busy(engine)
        run(engine)
    for s in trace.recorders[0].steps:
        phases = {phase: s.seconds(phase) for phase in PHASES}
        assert min(phases[p] for p in ("schedule", "build", "submit", "wait", "finish")) > 0 == phases["compile"]
        # Between submission and result the engine only advances: two readings of the clock.
        assert 0 <= s.ended_s - s.began_s - sum(phases.values()) - s.profiler_s <= 3
        assert s.seconds("wait") <= s.seconds("device") <= s.ended_s - s.began_s


def test_steps_of_one_call_share_its_times(tmp_path):
    with tracing(tmp_path, profile_steps=0) as trace:
        engine = make_engine(num_scheduler_steps=4)
        engine.add_request(prompt_of(5), asking(9))
        run(engine)
    steps = trace.recorders[0].steps
    assert [s.record for s in steps] == engine.records and [s.record.num_tokens for s in steps] == [5] + [1] * 8
    assert [s.record.shape for s in steps] == [g.shape for g in engine.executor.steps]
    for first in (1, 5):
        shared = {tuple(map(s.seconds, ("submit", "wait", "device"))) for s in steps[first : first + 4]}
        # The clock ticks once from submission to its end, and once while the result is waited for.
        assert len(shared) == 1 and {submit_s for submit_s, _, _ in shared} == {1 / 4}
        assert steps[first].idle_s > 0 and not any(s.idle_s for s in steps[first + 1 : first + 4])
        assert all(s.seconds("build") > 0 and s.seconds("finish") > 0 for s in steps[first : first + 4])


@pytest.mark.parametrize("ahead", [False, True])
def test_the_device_is_idle_between_a_result_and_the_next_submission(tmp_path, ahead):
    with tracing(tmp_path, profile_steps=0) as trace:
        engine = make_engine(async_scheduling=ahead)
        for _ in range(2):
            engine.add_request(prompt_of(5), asking(6))
            run(engine)
    steps = trace.recorders[0].steps
    # The first step of each request finds an engine without work, and no step was submitted while another one ran.
    waited = [i for i, s in enumerate(steps) if s.idle_s > 0]
    assert waited == ([] if ahead else [*range(1, 6), *range(7, 12)])
    for before, s in itertools.pairwise(steps):
        if s.idle_s:
            submitted_s = s.began_s + s.seconds("schedule") + s.seconds("build")
            assert s.idle_s == submitted_s - sum(before.slices["wait"])
    expected = sum(s.idle_s for s in steps) / sum(s.idle_s + s.seconds("device") for s in steps)
    assert summary(steps, {}, trace.recorders[0].flops)["device_idle"] == expected


def test_a_step_that_fails_is_forgotten_and_the_next_one_is_seen(tmp_path):
    with tracing(tmp_path, profile_steps=0) as trace:
        engine = make_engine(**SETTINGS)
        busy(engine)
        step(engine)
        engine.executor.fails = "after moves"
        with pytest.raises(Exception, match="as told"):
            step(engine)
        engine.executor.fails = None
        engine.add_request(prompt_of(9), asking(4), request_id="later")
        run(engine)
    assert [s.record for s in trace.recorders[0].steps] == engine.records
    assert [r.request_id for r in trace.recorders[0].requests] == [*(f"r{i}" for i in range(5)), "later"]


def test_a_recorder_that_comes_while_a_step_is_under_way_begins_with_the_next_one():
    engine = make_engine(async_scheduling=True)
    request = engine.add_request(prompt_of(5), asking(6))
    step(engine)
    assert engine.num_steps_under_way
    recorder = Recorder(engine)
    run(engine)
    assert [s.record for s in recorder.steps] == engine.records[2:]
    assert [s.tokens["request-0/0"] for s in recorder.steps] == request.completions[0].token_ids[2:]


def test_an_engine_that_is_dropped_gives_its_pool_back_while_the_trace_goes_on(tmp_path):
    with tracing(tmp_path, profile_steps=0) as trace:
        engine = make_engine(**SETTINGS)
        busy(engine)
        run(engine)
        there = weakref.ref(engine.executor)
        del engine
        gc.collect()
        assert there() is None
        make_engine(**SETTINGS)
    assert [len(w.steps) > 0 for w in trace.recorders] == [True, False]


def test_a_folder_with_files_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with (
        pytest.raises(ConfigError, match=r"is not empty: a trace is written to a folder of its own"),
        tracing(tmp_path),
    ):
        raise AssertionError("ran")
    with pytest.raises(ConfigError, match="notes is not a folder"), tracing(tmp_path / "notes"):
        raise AssertionError("ran")


def test_nothing_is_written_where_no_engine_was_built(tmp_path):
    with tracing(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
