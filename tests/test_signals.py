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


SWALLOWS = """
import gc, signal
from ksana_jax import interrupts
interrupts.install()
def callback(phase, info):  # what jax does
    if phase == "start":
        signal.raise_signal(signal.SIGINT)
gc.callbacks.append(callback)
gc.collect()
gc.callbacks.clear()
print("swallowed")
with interrupts.deferred():
    print("a step")
print("never")
"""


def test_what_a_callback_swallows_is_raised_after_the_next_step():
    done = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n") == ["swallowed", "a step", ""]
    assert "KeyboardInterrupt" in done.stderr and done.returncode
