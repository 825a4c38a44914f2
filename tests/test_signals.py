"""Ctrl-C waits for the end of what is deferred, is never lost, and leaves handlers as they were."""

import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from ksana_jax.core import interrupts
from tests.interrupts import Interrupt


def press():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_takes_effect_at_the_end_of_what_is_deferred():
    def step():
        press()
        done.append(1)

    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupts.defer(step)
    assert done and not interrupts.requested()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_deferred_gets_its_arguments_and_returns_its_result():
    assert interrupts.defer(divmod, 7, 2) == (3, 1)


def test_ctrl_c_twice_takes_effect_at_once():
    def step():
        press()
        press()
        done.append(1)

    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupts.defer(step)
    assert not done
    interrupts.check()  # nothing is left of it


def test_calls_can_be_nested_and_checked_in_between():
    def step():
        interrupts.defer(press)
        done.append("after the inner one")
        interrupts.check()
        done.append("never")

    done = []
    with pytest.raises(KeyboardInterrupt):
        interrupts.defer(step)
    assert done == ["after the inner one"] and not interrupts.requested()


def test_another_exception_is_not_replaced():
    def step():
        press()
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        interrupts.defer(step)
    assert not interrupts.requested()


def test_a_handler_of_the_users_own_stays():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        interrupts.defer(press)
        assert pressed
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone():
    def work():
        seen.append(interrupts.defer(signal.getsignal, signal.SIGINT))
        interrupts.check()

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_exception_at_any_line_of_the_bookkeeping_costs_no_later_ctrl_c(error):
    def step():
        press()
        done.append(1)

    num_lines = []
    for line in range(1, 200):
        interrupt = Interrupt(error("as told"), line, None)
        with contextlib.suppress(KeyboardInterrupt, MemoryError), interrupt:
            interrupts.defer(step if line % 2 else list)
        num_lines.append(interrupt.num_lines)
        done = []
        with pytest.raises(KeyboardInterrupt):
            interrupts.defer(step)
        assert done == [1], f"at once, after {interrupt.where}"
        interrupts.check()
        with pytest.raises(KeyboardInterrupt):
            press()
        assert not interrupts.requested(), f"left over, after {interrupt.where}"
    assert max(num_lines) < 199  # there is no line after these


def test_a_command_where_ctrl_c_is_ignored_leaves_nothing_behind():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.command():
        pass
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        interrupts.defer(press)
    interrupts.defer(list)


PRESSED = """
import gc, signal, sys
from ksana_jax.core import interrupts
def callback(phase, info):  # what jax does
    if phase == "start":
        signal.raise_signal(signal.SIGINT)
with interrupts.command("the end"):
    try:
        %s
    finally:
        print("over")
print("never")
"""
SWALLOWED = "gc.callbacks.append(callback); gc.collect(); gc.callbacks.clear()"


@pytest.mark.parametrize(
    ("what", "printed"),
    [
        ("signal.raise_signal(signal.SIGINT); print('never')", ["over"]),
        (f"{SWALLOWED}; print('swallowed')", ["swallowed", "over"]),
        (
            f"{SWALLOWED}\n        interrupts.defer(print, 'a step')\n        print('never')",
            ["a step", "over"],
        ),
        ("try: signal.raise_signal(signal.SIGINT)\n        except KeyboardInterrupt: raise ImportError", ["over"]),
        ("try: signal.raise_signal(signal.SIGINT)\n        except KeyboardInterrupt: sys.exit(1)", ["over"]),
    ],
    ids=["raised", "swallowed", "swallowed before a step", "another exception", "another status"],
)
def test_a_command_ends_with_status_130_whatever_libraries_make_of_ctrl_c(what, printed):
    done = subprocess.run([sys.executable, "-c", PRESSED % what], capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
    assert done.stdout.split() == " ".join(printed).split() and done.stderr.endswith("the end\n")


def test_a_command_in_a_larger_process_leaves_its_handler():
    with interrupts.command():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupts.defer(press)
    interrupts.check()


AT_IMPORT = """
import runpy, signal, sys
class Press:
    def find_spec(self, name, path, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Press())
sys.argv = ["ksana", "doctor"]
runpy.run_module("ksana_jax", run_name="__main__")
"""


def test_ctrl_c_while_the_command_starts():
    done = subprocess.run([sys.executable, "-c", AT_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (130, "ksana: interrupted\n", "")


IN_CREATION = """
import _imp, signal
from ksana_jax.core import interrupts
create = _imp.create_dynamic
def press(spec, *more):
    module = create(spec, *more)
    if spec.name == "jaxlib._jax":
        signal.raise_signal(signal.SIGINT)
    return module
_imp.create_dynamic = press
with interrupts.command():
    from jaxlib import _jax
    import time
    time.sleep(20)
"""


def test_ctrl_c_does_not_leave_an_extension_module_half_made():
    done = subprocess.run([sys.executable, "-c", IN_CREATION], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "ksana: interrupted\n")


ENDS_AT_ONCE = """
import signal, time
from ksana_jax.core import interrupts
press = compile("signal.raise_signal(signal.SIGINT)", "<frozen importlib._bootstrap>", "exec")
try:
    with interrupts.command():
        exec(press)
finally:
    time.sleep(0.1)
"""


def test_a_command_that_ends_meanwhile_is_not_hit_by_what_is_sent_again():
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "ksana: interrupted\n")


def test_ctrl_c_while_text_is_generated():
    arguments = ["generate", "ksana-tiny", "-p", "def f(x):", "--max-tokens", "400", "--seed", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ksana_jax", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("ksana: interrupted\n") and "Traceback" not in errors
