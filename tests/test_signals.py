"""Ctrl-C waits for the end of what is deferred, is never lost, and leaves handlers as they were."""

import signal
import subprocess
import sys
import threading

import pytest

from ksana_jax import interrupts


def press():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_takes_effect_at_the_end_of_what_is_deferred():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.deferred():
            press()
            done.append(1)
    assert done and not interrupts.requested()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_twice_takes_effect_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.deferred():
            press()
            press()
            done.append(1)
    assert not done
    interrupts.check()  # nothing is left of it


def test_sections_can_be_nested_and_checked_in_between():
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts.deferred():
            with interrupts.deferred():
                press()
            done.append("after the inner one")
            interrupts.check()
            done.append("never")
    assert done == ["after the inner one"] and not interrupts.requested()


def test_another_exception_is_not_replaced():
    with pytest.raises(ValueError, match="first"):
        with interrupts.deferred():
            press()
            raise ValueError("first")
    assert not interrupts.requested()


def test_a_handler_of_the_users_own_stays():
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    try:
        with interrupts.deferred():
            press()
            assert pressed
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_left_alone():
    def work():
        with interrupts.deferred():
            seen.append(signal.getsignal(signal.SIGINT))
        interrupts.check()

    seen = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


PRESSED = """
import gc, signal, sys
from ksana_jax import interrupts
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
            f"{SWALLOWED}\n        with interrupts.deferred(): print('a step')\n        print('never')",
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
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        press()
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
from ksana_jax import interrupts
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
from ksana_jax import interrupts
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
