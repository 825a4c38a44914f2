"""Keeps an engine consistent under threads and interrupts: one thread at a time, every change complete or undone.

Any line can raise an exception: Ctrl-C, a signal handler, lack of memory. Nothing is therefore repaired on the spot. A
change calls `begin_write` before it starts to write. If it does not complete, the engine is reset; if the reset is
interrupted too, the next change resets first.
"""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ksana_jax.core import interrupts
from ksana_jax.core.forks import check_process

P = ParamSpec("P")
T = TypeVar("T")


class Interrupted(RuntimeError):
    """A change was interrupted, and so was the cleanup after it."""


class EngineLock:
    """Runs all changes of an engine, one at a time.

    Args:
      reset: (exception) -> None, makes the engine empty and consistent again; called again if it was interrupted.
    """

    def __init__(self, reset: Callable[[BaseException], None]):
        self._reset, self._process = reset, os.getpid()
        # Only locks of the interpreter: a lock written in Python could stay locked after an interrupt in its own code.
        self._lock = threading.RLock()
        self._waiting: set[int] = set()
        self._unsound = False
        self._deferred: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def running_here(self) -> bool:
        """True if this thread is in the middle of a change, in an observer or in a finaliser."""
        return self._lock._is_owned()  # type: ignore[attr-defined]  threading.Condition asks an RLock in the same way

    def begin_write(self) -> None:
        """Marks that the running change starts to write; an exception before this point needs no reset."""
        self._unsound = True

    @property
    def is_inherited(self) -> bool:
        """True if this is a forked child of the engine's process."""
        return self._process != os.getpid()

    def check_process(self) -> None:
        """Raises RuntimeError in a forked child, which has none of the threads that compute for the engine."""
        if self.is_inherited:
            check_process("this engine was created", self._process)

    def run_or_defer(self, change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Runs a change, or schedules it to run before the next one if another one is running in this thread. In a
        forked child, which ends with copies of its parent's requests, does nothing."""
        if self.running_here:  # Python collects a stream that was dropped, in the middle of a step
            self._deferred.append(functools.partial(change, *args, **kwargs))
        elif not self.is_inherited:
            self.run(change, *args, **kwargs)

    def run(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs one change while no other thread does; see `exclusive`."""
        return self.exclusive(False, change, *args, **kwargs)

    @interrupts.defers
    def exclusive(self, defers: bool, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs one change while no other thread does.

        Args:
          defers: whether Ctrl-C takes effect after it. To set and restore its handler takes some 20 us.

        Raises:
          KeyboardInterrupt: Ctrl-C was pressed in the meantime.
          RuntimeError: it was called from within a change, a failure could not be cleaned up, so nothing can run, or
            this is a forked child.
        """
        self.check_process()
        if self.running_here:
            raise RuntimeError("an engine cannot be used from within its own step")
        is_outermost, changed, done = defers and interrupts.enter(sys._getframe(1)), False, False
        try:
            self._waiting.add(threading.get_ident())
            with self._lock:
                self._waiting.discard(threading.get_ident())
                try:
                    if self._unsound:
                        self._recover(Interrupted("a step was interrupted, and so was the reset that followed it"))
                    while self._deferred:
                        self._deferred.popleft()()
                    result = change(*args, **kwargs)
                    changed, self._unsound = self._unsound, False
                    done = True
                    return result
                except BaseException as error:
                    if self._unsound or changed:
                        self._recover(error)
                    raise
        finally:
            if is_outermost and interrupts.leave() and done:
                raise KeyboardInterrupt

    def _recover(self, error: BaseException) -> None:
        self._unsound = True
        try:
            self._reset(error)
        except Exception as failed:
            raise RuntimeError(
                f"after {type(error).__name__} the engine could not be made empty ({type(failed).__name__}: {failed}): "
                "close it, or free memory and use it again"
            ) from error
        self._unsound = False

    def yield_lock(self) -> None:
        """Lets a waiting thread in. Otherwise, the thread that has just released the lock would nearly always win."""
        for _ in range(50):
            if not self._waiting:
                return
            time.sleep(2e-5)
