"""Threads for work on text that would hold up an event loop: tokenizing, chat templates."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TextPool:
    """Runs functions in a few threads, on behalf of tasks of an event loop.

    Args:
      num_threads: most functions that run at once; others wait.
    """

    def __init__(self, num_threads: int = 2):
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="ksana-text")

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what function(*args, **kwargs) returns, or raises what it raises.

        A task that is cancelled while its function waits for a thread takes it out of the queue; a function that runs
        cannot be stopped.
        """
        return await asyncio.wrap_future(self._threads.submit(function, *args, **kwargs))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
