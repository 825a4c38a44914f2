"""One thread at a time, and every change whole or undone: what keeps an engine sound among threads and interrupts.

An exception can come from any line: Ctrl-C, an alarm's handler, no memory. So nothing is repaired where it breaks.
A change says when it begins to write (`begin`); one that does not come to its end is followed by a reset, and if that
is interrupted too, the next change resets first.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Interrupted(RuntimeError):
    """A change was interrupted, and so was what cleaned up after it."""


class Changes:
    """Runs everything that changes an engine.

    Args:
      reset: makes the engine empty and sound again, given what went wrong; called again when it was interrupted.
    """

    def __init__(self, reset: Callable[[BaseException], None]):
        self._reset = reset
        # Locks of the interpreter only: a lock in Python could be left taken by an interrupt in its own code.
        self._lock = threading.RLock()
        self._waiting: set[int] = set()
        self._unsound = False
        self._deferred: collections.deque[Callable[[], None]] = collections.deque()

    @property
    def running_here(self) -> bool:
        """Whether this thread is in the middle of a change, in an observer or in a finaliser."""
        return self._lock._is_owned()  # type: ignore[attr-defined]  threading.Condition asks an RLock in the same way

    def begin(self) -> None:
        """Says that the running change begins to write; what it raised before left everything as it was."""
        self._unsound = True

    def defer(self, change: Callable[[], None]) -> None:
        """Runs a change before the next one."""
        self._deferred.append(change)

    def run(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs one change, when those of other threads are done.

        Raises:
          RuntimeError: called from within a change; or a failure could not be cleaned up, so that nothing can run.
        """
        if self.running_here:
            raise RuntimeError("an engine cannot be used from within its own step")
        self._waiting.add(threading.get_ident())
        with self._lock:
            return self._run_alone(change, *args, **kwargs)

    def _run_alone(self, change: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self._waiting.discard(threading.get_ident())
        changed = False
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

    def give_way(self) -> None:
        """Lets a waiting thread in. Without this, the thread that has just left the lock would nearly always be the
        one that takes it again."""
        for _ in range(50):
            if not self._waiting:
                return
            time.sleep(2e-5)
