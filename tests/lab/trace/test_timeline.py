"""A timeline has each step's phases where they were, each request from its arrival to its end, and the pool's use."""

import itertools
import json

import pytest

from ksana_jax.lab.trace import tracing
from ksana_jax.lab.trace.steps import PHASES
from ksana_jax.lab.trace.timeline import DEVICE, HOST
from tests.fakes import asking, make_engine, prompt_of, run, step


def drawn(folder, drive, **settings):
    """The events of an engine's timeline, and its steps."""
    with tracing(folder, profile_steps=0) as trace:
        engine = make_engine(**settings)
        drive(engine)
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return [e for e in events if e["pid"] == 1], trace.recorders[0].steps


def serve(engine):
    for i in range(3):
        engine.add_request(prompt_of(9 + i), asking(9), request_id=f"r{i}")
        step(engine)
    run(engine)


MODES = pytest.mark.parametrize(
    "settings",
    [{}, {"async_scheduling": True}, {"async_scheduling": True, "num_scheduler_steps": 3}],
    ids=["synchronous", "ahead", "several at once"],
)


@MODES
def test_no_slice_of_the_host_or_of_the_device_overlaps_another(tmp_path, settings):
    events, steps = drawn(tmp_path, serve, **settings)
    for thread in (HOST, DEVICE):
        slices = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == thread)
        assert len(slices) >= len(steps) and slices[0][0] >= 0
        for (before, dur), (ts, _) in itertools.pairwise(slices):
            assert ts >= before + dur - 0.01  # times are rounded to nanoseconds


@MODES
def test_slices_of_a_step_last_as_long_as_its_phases(tmp_path, settings):
    events, steps = drawn(tmp_path, serve, **settings)
    lasted = {(e["args"]["step"], e["name"]): e["dur"] for e in events if e["ph"] == "X" and e["tid"] == HOST}
    expected = {(s.step, phase): 1e6 * s.seconds(phase) for s in steps for phase in PHASES}
    assert lasted == pytest.approx({k: v for k, v in expected.items() if v})
    on_device = {e["args"]["step"]: e for e in events if e["ph"] == "X" and e["tid"] == DEVICE}
    for s in steps:
        assert on_device[s.step]["dur"] == pytest.approx(1e6 * s.seconds("device"))
        assert on_device[s.step]["args"]["padded_tokens"] == s.record.shape.num_tokens


def test_a_request_waits_decodes_and_ends_and_one_without_an_end_goes_on_until_the_last_step(tmp_path):
    def leave(engine):
        engine.add_request(prompt_of(9), asking(2), request_id="done")
        engine.add_request(prompt_of(9), asking(30), request_id="open")
        for _ in range(4):
            step(engine)

    events, _ = drawn(tmp_path, leave)
    begun, ended = ({(e["id"], e["name"]): e["ts"] for e in events if e["ph"] == ph} for ph in "be")
    assert begun.keys() == ended.keys() == {(f"1/{r}", n) for r in ("done", "open") for n in (r, "waiting", "decoding")}
    for r in ("done", "open"):
        whole, waiting, decoding = ((f"1/{r}", name) for name in (r, "waiting", "decoding"))
        assert begun[whole] == begun[waiting] < ended[waiting] == begun[decoding] < ended[decoding] == ended[whole]
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert ended["1/open", "open"] == last > ended["1/done", "done"]


def test_counters_follow_the_pool_and_the_queue(tmp_path):
    events, steps = drawn(tmp_path, serve, num_blocks=12, caching=True)
    counted = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "KV blocks"]
    records = [s.record for s in steps]
    assert counted == [{"held": r.peak_blocks, "cached": r.cached_blocks} for r in records] and counted[0]["held"] > 0
    queues = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "sequences"]
    assert queues == [{"running": r.num_running, "waiting": r.num_waiting} for r in records]


def test_requests_of_two_engines_are_apart_though_they_have_the_same_ids(tmp_path):
    with tracing(tmp_path, profile_steps=0):
        for _ in range(2):
            serve(make_engine())
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    begun = {(e["pid"], e["id"]) for e in events if e["ph"] == "b"}
    assert len(begun) == len({request for _, request in begun}) == 6


def test_every_engine_is_a_process_and_one_without_steps_has_only_its_names(tmp_path):
    with tracing(tmp_path, profile_steps=0):
        make_engine()
        serve(make_engine())
    found = json.loads((tmp_path / "timeline.json").read_text())
    by_engine = {n: {e["ph"] for e in found["traceEvents"] if e["pid"] == n} for n in (1, 2)}
    assert by_engine == {1: {"M"}, 2: {"M", "X", "C", "b", "e"}} and found["displayTimeUnit"] == "ms"
