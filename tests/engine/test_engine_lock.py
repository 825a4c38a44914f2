"""Whatever line an exception comes from, no request is left, the books balance and later texts are right. See
`tests.interrupts`."""

import subprocess
import sys
import threading

import pytest

from ksana_jax.engine.engine_lock import EngineLock
from tests.fakes import FULLY, asking, make_engine, prompt_of, reference_tokens
from tests.interrupts import interrupt_some


def test_an_exception_at_any_line_leaves_an_empty_engine_that_serves_again():
    hit = interrupt_some(range(400, 720))
    late = hit.pop("", 0)
    assert late < 40
    places = {line.split(":")[0] for line in hit}
    engine = "engine.engine.Engine"
    for part in (
        engine,
        f"{engine}._add",
        "scheduler.scheduler",
        "scheduler.row_blocks",
        "kv.block_manager",
        "scheduler.step",
    ):
        assert any(place.startswith(f"{part}.") or place == part for place in places), f"none in {part}: {places}"


def test_beams_of_two_requests_that_hold_all_blocks_are_preempted_though_a_read_from_disk_awaits_its_turn():
    interrupt_some(range(2431, 2432))  # did not end


@pytest.mark.soak
def test_a_thousand_exceptions_leave_no_damage():
    hit = interrupt_some(range(1000, 2100))
    assert hit.total() - hit[""] >= 1000


def test_nothing_rests_on_assertions():
    command = [sys.executable, "-O", "-m", "tests.interrupts", "--examples", "40"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no damage" in done.stdout


# ------------------------------------------------------------------ one change at a time


def test_an_exception_before_a_change_begins_resets_nothing():
    resets = []
    lock = EngineLock(resets.append)

    def refuse():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        lock.run(refuse)
    assert not resets


def test_a_reset_that_is_interrupted_is_done_again_by_the_next_change():
    resets = []

    def reset(error):
        resets.append(error)
        if len(resets) == 1:
            raise KeyboardInterrupt

    lock = EngineLock(reset)

    def break_down():
        lock.begin_write()
        raise MemoryError

    with pytest.raises(KeyboardInterrupt):
        lock.run(break_down)
    assert lock.run(lambda: "done") == "done"
    assert len(resets) == 2


def test_an_engine_that_cannot_be_reset_says_so_until_it_can():
    engine = make_engine()
    request = engine.add_request(prompt_of(5), asking())
    reset, engine.executor.reset = engine.executor.reset, lambda: 1 / 0
    execute, engine.executor.submit = engine.executor.submit, lambda step: 1 / 0
    words = r"could not be made empty \(ZeroDivisionError.*close it"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            engine.step()
    assert request.finished
    engine.executor.reset, engine.executor.submit = reset, execute
    again = engine.add_request(prompt_of(5), asking())
    while engine.has_work:
        engine.step()
    assert again.output().outputs[0].token_ids == reference_tokens(prompt_of(5), 8, FULLY)


def test_an_engine_is_not_used_from_within_its_own_step():
    engine = make_engine()
    engine.observers.append(lambda engine: engine.step())
    engine.add_request(prompt_of(5), asking())
    with pytest.raises(RuntimeError, match="from within its own step"):
        engine.step()


def test_a_stream_that_is_collected_in_the_middle_of_a_step_is_aborted_after_it():
    engine = make_engine()
    dropped = engine.serve([engine.new_request(prompt_of(5), asking(), streams=True)])
    next(dropped)
    request = engine.add_request(prompt_of(6), asking())
    engine.observers.append(lambda engine: dropped.close())
    engine.step()
    engine.observers.clear()
    engine.step()
    assert list(engine.requests.values()) == [request]
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    assert request.output().outputs[0].token_ids == reference_tokens(prompt_of(6), 8, FULLY)


def test_another_thread_waits_for_a_change_to_end():
    lock, order, entered = EngineLock(lambda error: None), [], threading.Event()

    def slow():
        entered.set()
        while not lock._waiting:
            pass
        order.append("first")

    first = threading.Thread(target=lock.run, args=[slow])
    first.start()
    entered.wait()
    lock.run(order.append, "second")
    first.join()
    assert order == ["first", "second"]
