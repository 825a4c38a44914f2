"""Threads for work on text that would hold up an event loop: tokenizing, chat templates."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
# A future and the call that gives its result; None ends a thread.
_Jobs: TypeAlias = "queue.SimpleQueue[tuple[concurrent.futures.Future, Callable[[], Any]] | None]"


class TokenizerThreads:
    """Runs functions in a few threads, on behalf of tasks of an event loop.

    The threads are daemons: a process that ends does not wait for a text, as it would for a ThreadPoolExecutor.

    Args:
      num_threads: most functions that run at once; others wait.
    """

    def __init__(self, num_threads: int = 2):
        self._jobs: _Jobs = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _end, self._jobs, num_threads)
        for number in range(num_threads):
            threading.Thread(target=_work, args=(self._jobs,), name=f"ksana-text-{number}", daemon=True).start()

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what function(*args, **kwargs) returns, or raises what it raises.

        A task that is cancelled while its function waits for a thread takes it out of the queue; a function that runs
        cannot be stopped.

        Raises:
          RuntimeError: the pool is closed.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._lock:
            if not self._end.alive:
                raise RuntimeError("the tokenizer threads have shut down")
            self._jobs.put((future, functools.partial(function, *args, **kwargs)))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Cancels waiting calls; does not wait for running ones."""
        with self._lock:
            self._end()


def _work(jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, call = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del job, future, call  # while the thread waits for the next one


def _end(jobs: _Jobs, num_threads: int) -> None:
    while not jobs.empty():
        try:
            job = jobs.get_nowait()
        except queue.Empty:  # a thread was faster
            break
        if job is not None:
            job[0].cancel()
            job[0].set_running_or_notify_cancel()
    for _ in range(num_threads):
        jobs.put(None)
