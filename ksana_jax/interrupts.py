"""Ctrl-C between steps instead of within one. Imports the standard library only: the `ksana` command starts with it.

Python raises KeyboardInterrupt wherever it happens to be: in the middle of the engine's books, or in a callback of a
library that swallows it. Within `deferred` the first Ctrl-C only sets a flag, which is looked at when the step is done
(`check`); a second one raises at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

_requested = False
_num_deferred = 0
_in_command = False
_retry: threading.Timer | None = None  # sends again a SIGINT that could not be raised when it came


def requested() -> bool:
    """Whether Ctrl-C was pressed and nothing has come of it yet."""
    return _requested


def check() -> None:
    """Raises KeyboardInterrupt in the main thread if Ctrl-C was pressed."""
    global _requested
    if _requested and threading.current_thread() is threading.main_thread():
        _requested = _in_command  # a command is to end, whoever catches this
        raise KeyboardInterrupt


def forget() -> None:
    """Says that Ctrl-C has been dealt with and the command goes on: it stopped one answer, not the conversation."""
    global _requested
    _requested = False


class deferred:
    """Lets what runs within come to its end before Ctrl-C takes effect. May be nested; does nothing in other threads
    than the main one, which handles signals."""

    def __enter__(self) -> None:
        global _num_deferred
        self._restores, self._here = False, threading.current_thread() is threading.main_thread()
        if self._here:
            _num_deferred += 1
            self._restores = _take_over()

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


class command:
    """Ends a command with status 130 after Ctrl-C, whatever libraries have made of it: they turn KeyboardInterrupt into
    other exceptions, or swallow it.

    Args:
      message: the last line on stderr then.
    """

    def __init__(self, message: str = "ksana: interrupted"):
        self._message = message

    def __enter__(self) -> None:
        global _in_command
        self._restores = _take_over()
        _in_command = True

    def __exit__(self, *_: object) -> None:
        global _in_command, _requested
        interrupted, _requested = _requested, False
        if interrupted:
            if _retry is not None:
                _retry.cancel()
                _retry.join()
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends what may hang
        elif self._restores:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._restores:
            _in_command = False
        if interrupted:
            print(self._message, file=sys.stderr, flush=True)
            raise SystemExit(130) from None


def _take_over() -> bool:
    """Handles SIGINT, unless a handler of the user's own does."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)
        return True
    return False


def _handle(signum: int, frame: FrameType | None) -> None:
    global _requested, _retry
    again, _requested, _retry = _requested and _retry is None, True, None
    if again:
        raise KeyboardInterrupt
    if _num_deferred:
        if _in_command:
            os.write(2, b"ksana: stops after this step; Ctrl-C again stops at once\n")
    elif _is_importing(frame):
        # Extension modules made with nanobind, which jaxlib has many of, end the process with a segmentation fault when
        # they are freed half imported.
        _retry = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        _retry.daemon = True
        _retry.start()
    else:
        raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
