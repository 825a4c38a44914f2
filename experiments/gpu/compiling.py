"""Lowered programs compiled by threads, in submission order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from experiments.gpu.context import Context
from experiments.gpu.marks import mark

# No more on few processors: the first programs must finish first, and a slow one must not hold up all.
WORKERS = min(12, max(4, os.cpu_count() or 1))
# Seconds of a single compilation, after which it counts as hung.
COMPILE_S = 90.0


class Compiling:
    """A queue of programs to compile.

    Where the context asks for care, each is compiled when it is handed in, under the guard.
    """

    def __init__(self, context: Context, workers: int = WORKERS):
        self._context, self._todo = context, queue.SimpleQueue()
        self._results: dict[Any, Any] = {}
        self._changed = threading.Condition()
        self._num_submitted, self._idle = 0, 0 if context.careful else workers

    @property
    def pending(self) -> int:
        """Programs that are handed in and not compiled yet."""
        return self._num_submitted - len(self._results)

    def submit(self, name: Any, lowered: Any, *, who: str, case: str, options: dict[str, Any] | None = None) -> None:
        """Hands in a lowered program under a name of its own; options are the compiler's."""
        self._num_submitted += 1
        if self._context.careful:
            with self._context.guard(who, case, seconds=COMPILE_S):
                self._compile(name, lowered, options)
            return
        self._todo.put((name, lowered, options, who, case))
        if self._idle:
            self._idle -= 1
            # A daemon: a compiler that hangs must not keep the process alive.
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            name, lowered, options, who, case = self._todo.get()
            with mark(self._context.folder, "compiles", who, case):
                self._compile(name, lowered, options)

    def _compile(self, name: Any, lowered: Any, options: dict[str, Any] | None) -> None:
        try:
            result = lowered.compile(options)
        except Exception as error:
            result = error
        with self._changed:
            self._results[name] = result
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits until nothing is pending, or for some seconds; returns whether nothing is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.pending, timeout_s)

    def done(self, name: Any) -> bool:
        return name in self._results

    def result(self, name: Any) -> Any:
        """The compiled function.

        Raises:
          Exception: why it cannot be compiled; TimeoutError where it is not compiled yet.
        """
        found = self._results.get(name, TimeoutError("it was not compiled in time"))
        if isinstance(found, Exception):
            raise found
        return found


def compile_in_parallel(
    context: Context, lowered: Sequence[tuple[Any, Any]], *, timeout_s: float, case: str, who: Callable[[Any], str]
) -> dict[Any, Any]:
    """{name: compiled, or the exception} of (name, lowered) pairs; a TimeoutError for those that were not done.

    Args:
      who: maps a name to the candidate to leave out if compiling it aborts the process.
    """
    compiling, found = Compiling(context), {}
    for name, low in lowered:
        compiling.submit(name, low, who=who(name), case=case)
    compiling.wait(timeout_s)
    for name, _ in lowered:
        try:
            found[name] = compiling.result(name)
        except Exception as error:
            found[name] = error
    return found
