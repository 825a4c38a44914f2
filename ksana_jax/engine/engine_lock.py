"""Keeps an engine consistent under threads and interrupts: one thread at a time, every change complete or undone.

Any line can raise an exception: Ctrl-C, a signal handler, lack of memory. Nothing is therefore repaired on the spot. A
change calls `begin_write` before it starts to write. If it does not complete, the engine is reset; if the reset is
interrupted too, the next change resets first.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
        self._reset = reset
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

    def run_or_defer(self, change: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Runs a change, or schedules it to run before the next one if another one is running in this thread."""
        if self.running_here:  # Python collects a stream that was dropped, in the middle of a step
            self._deferred.append(functools.partial(change, *args, **kwargs))
        else:
            self.run(change, *args, **kwargs)

    def run(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs one change while no other thread does.

        Raises:
          RuntimeError: it was called from within a change, or a failure could not be cleaned up, so nothing can run.
        """
        if self.running_here:
            raise RuntimeError("an engine cannot be used from within its own step")
        changed = False
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
                return result
            except BaseException as error:
                if self._unsound or changed:
                    self._recover(error)
                raise

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
