"""Defers Ctrl-C to the end of a step. Imports only the standard library, because the `ksana` command starts with it.

Python raises KeyboardInterrupt at any point: in the middle of an update of the engine's state, or in a callback of a
library that swallows it. Within `defer`, the first Ctrl-C only sets a flag, which is checked when the step is done
(`check`); a second one raises at once.

Whether Ctrl-C is deferred is read from the stack of the main thread and stored nowhere else: a counter would stay wrong
after an exception in the lines that update it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

_requested = False
_in_command = False
_deferring: set[CodeType] = set()  # of functions during which Ctrl-C waits
_retry: threading.Thread | None = None  # resends a SIGINT that could not be raised when it arrived


def requested() -> bool:
    """True if Ctrl-C was pressed and has not been handled yet."""
    return _requested


def check() -> None:
    """Raises KeyboardInterrupt in the main thread if Ctrl-C was pressed."""
    global _requested
    if _requested and threading.current_thread() is threading.main_thread():
        _requested = _in_command  # a command must end, even if something catches this
        raise KeyboardInterrupt


def forget() -> None:
    """Marks Ctrl-C as handled, so that the command continues: it stopped one answer, not the conversation."""
    global _requested
    _requested = False


def defers(function: F) -> F:
    """Marks a function that calls `enter` and `leave`; one with an argument `defers`, where that is true."""
    _deferring.add(function.__code__)  # pyright: ignore[reportFunctionMemberAccess]
    return function


@defers
def defer(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function that completes before Ctrl-C takes effect.

    Calls may be nested: the outermost one raises. Outside the main thread, which handles signals, and if the user has
    installed a handler, this is a plain call.

    Returns:
      The function's result.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed in the meantime.
    """
    is_outermost, pressed = enter(sys._getframe(1)), False
    try:
        result = function(*args, **kwargs)
    finally:
        if is_outermost:
            pressed = leave()
    if pressed:
        raise KeyboardInterrupt
    return result


def enter(caller: FrameType | None) -> bool:
    """Begins to defer Ctrl-C in a function marked by `defers`; returns whether it must call `leave` at its end.

    Args:
      caller: the frame that has called it.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    is_outermost = not _is_deferred(caller)
    if is_outermost and not _in_command:
        forget()  # an earlier call may not have reached this because of an exception
    _take_over()
    return is_outermost


class command:
    """Ends a command with status 130 after Ctrl-C, even if libraries convert KeyboardInterrupt to another exception or
    swallow it.

    Args:
      message: printed as the last line on stderr in that case.
    """

    def __init__(self, message: str = "ksana: interrupted"):
        self._message = message

    def __enter__(self) -> None:
        global _in_command
        self._is_outermost = not _in_command
        _take_over()
        _in_command = True

    def __exit__(self, *_: object) -> None:
        global _in_command, _requested, _retry
        interrupted, _requested = _requested, False
        if interrupted:
            retry, _retry = _retry, None
            if retry is not None:
                retry.join()
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends a process that hangs
        if self._is_outermost:
            _in_command = False
        if interrupted:
            print(self._message, file=sys.stderr, flush=True)
            raise SystemExit(130) from None
        leave()


def _take_over() -> None:
    """Installs the SIGINT handler, unless the user has installed one."""
    here = threading.current_thread() is threading.main_thread()
    if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def leave() -> bool:
    """Ends what `enter` began: restores Python's SIGINT handler, except within a command.

    Returns:
      Whether Ctrl-C was pressed.
    """
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
        # Extension modules built with nanobind (jaxlib has many) crash the process if they are freed while
        # partially imported.
        _retry = threading.Thread(target=_resend, daemon=True)
        _retry.start()
    else:
        _requested = _in_command
        raise KeyboardInterrupt


def _resend() -> None:
    """Sends SIGINT to the main thread until it is handled: a system call that begins just after one does not end."""
    main, pause_s = threading.main_thread().ident, 0.01
    assert main is not None
    time.sleep(pause_s)
    while _retry is threading.current_thread():
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(5 * pause_s)


def _is_deferred(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _deferring and frame.f_locals.get("defers", True):
            return True
        frame = frame.f_back
    return False


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
