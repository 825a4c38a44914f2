"""Ctrl-C between steps instead of within one. Imports the standard library only: the `ksana` command starts with it.

Python raises KeyboardInterrupt wherever it happens to be: in the middle of the engine's books, or in a callback of a
library that swallows it. Within `defer` the first Ctrl-C only sets a flag, which is looked at when the step is done
(`check`); a second one raises at once.

Whether something is deferred is read off the stack of the main thread and kept nowhere else: a counter would be wrong
for good after an exception in the lines that count.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_requested = False
_in_command = False
_retry: threading.Timer | None = None  # sends again a SIGINT that could not be raised when it came


def requested() -> bool:
    """Whether Ctrl-C was pressed and nothing has come of it yet."""
    return _requested


def check() -> None:
    """Raises KeyboardInterrupt in the main thread if Ctrl-C was pressed."""
    global _requested
    if _requested and threading.current_thread() is threading.main_thread():
        _requested = _in_command  # a command is to end, whatever catches this
        raise KeyboardInterrupt


def forget() -> None:
    """Says that Ctrl-C has been dealt with and the command goes on: it stopped one answer, not the conversation."""
    global _requested
    _requested = False


def defer(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function, which comes to its end before Ctrl-C takes effect.

    Calls may be nested: the outermost one raises. It is a plain call in threads other than the main one, which handles
    signals, and where a handler of the user's own is installed.

    Returns:
      what the function returns.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        return function(*args, **kwargs)
    is_outermost, pressed = not _is_deferred(sys._getframe(1)), False
    if is_outermost and not _in_command:
        forget()  # an exception may have kept an earlier call from doing so
    _take_over()
    try:
        result = function(*args, **kwargs)
    finally:
        if is_outermost:
            pressed = _give_back()
    if pressed:
        raise KeyboardInterrupt
    return result


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
        self._is_outermost = not _in_command
        _take_over()
        _in_command = True

    def __exit__(self, *_: object) -> None:
        global _in_command, _requested
        interrupted, _requested = _requested, False
        if interrupted:
            if _retry is not None:
                _retry.cancel()
                _retry.join()
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more ends what may hang
        if self._is_outermost:
            _in_command = False
        if interrupted:
            print(self._message, file=sys.stderr, flush=True)
            raise SystemExit(130) from None
        _give_back()


def _take_over() -> None:
    """Handles SIGINT, unless a handler of the user's own does."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def _give_back() -> bool:
    """Leaves SIGINT to Python again, except within a command: whether Ctrl-C was pressed."""
    global _requested
    try:
        if signal.getsignal(signal.SIGINT) is _handle and not _in_command:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    finally:
        pressed, _requested = _requested, _requested and _in_command
    return pressed


def _handle(signum: int, frame: FrameType | None) -> None:
    global _requested, _retry
    again, _requested, _retry = _requested and _retry is None, True, None
    if not again and _is_deferred(frame):
        if _in_command:
            os.write(2, b"ksana: stops after this step; Ctrl-C again stops at once\n")
    elif not again and _is_importing(frame):
        # Extension modules made with nanobind, which jaxlib has many of, end the process with a segmentation fault when
        # they are freed half imported.
        _retry = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        _retry.daemon = True
        _retry.start()
    else:
        _requested = _in_command
        raise KeyboardInterrupt


def _is_deferred(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is defer.__code__:
            return True
        frame = frame.f_back
    return False


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
