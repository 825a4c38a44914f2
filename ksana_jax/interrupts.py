"""Ctrl-C between steps instead of within one. Imports the standard library only: the `ksana` command starts with it.

Python raises KeyboardInterrupt wherever it happens to be: in the middle of the engine's books, or in a callback of a
library that swallows it. Within `deferred` the first Ctrl-C only sets a flag, which is looked at when the step is done
(`check`); a second one raises at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_requested = False
_num_deferred = 0
_is_command = False


def install() -> None:
    """Handles Ctrl-C for a whole process: outside of `deferred` it raises as ever, and is remembered in case that what
    it raised was swallowed."""
    global _is_command
    if _handles_as_ever():
        signal.signal(signal.SIGINT, _handle)
        _is_command = True


def requested() -> bool:
    """Whether Ctrl-C was pressed, and `check` has not raised for it."""
    return _requested


def check() -> None:
    """Raises KeyboardInterrupt in the main thread if Ctrl-C was pressed."""
    global _requested
    if _requested and threading.current_thread() is threading.main_thread():
        _requested = _is_command  # a process that is to end stays so, whoever catches this
        raise KeyboardInterrupt


class deferred:
    """Lets what runs within come to its end before Ctrl-C takes effect. May be nested; does nothing in other threads
    than the main one, which handles signals."""

    _restores = False

    def __enter__(self) -> None:
        global _num_deferred
        self._here = threading.current_thread() is threading.main_thread()
        if self._here:
            _num_deferred += 1
            if _handles_as_ever():  # a handler of the user's own stays
                self._restores = True
                signal.signal(signal.SIGINT, _handle)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _num_deferred, _requested
        if not self._here:
            return
        _num_deferred -= 1
        if self._restores:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if kind is not None:  # which is what Ctrl-C was for
                _requested = False
        if kind is None and not _num_deferred:
            check()


def _handles_as_ever() -> bool:
    here = threading.current_thread() is threading.main_thread()
    return here and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _handle(signum: int, frame: FrameType | None) -> None:
    global _requested
    again, _requested = _requested, True
    if again or not _num_deferred:
        raise KeyboardInterrupt
    if _is_command:
        os.write(2, b"ksana: stops after this step; Ctrl-C again stops at once\n")
