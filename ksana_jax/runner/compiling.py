"""Compiles functions ahead of time, logs each and notifies observers. Knows no steps."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

logger = logging.getLogger("ksana_jax")


class CompilationObserver(Protocol):
    """Sees every function that is compiled in this process, in the thread that compiles it."""

    def lowered(self, lowered: Any, jaxpr: Any) -> None:
        """Called with each `jax.stages.Lowered`, and its source jaxpr."""
        ...

    def compiled(self, key: Any, lowered: Any, function: Any, traced_s: float, compiled_s: float) -> None:
        """Called with each compiled function, its key and source, and the seconds of tracing and compiling."""
        ...


# Empty without a trace: see `ksana_jax.lab.trace`.
observers: list[CompilationObserver] = []
# Called by `compile_all` with the number of the function that it waits for, from 1, and of all.
watchers: list[Callable[[int, int], None]] = []


def lower(function: Any, *arguments: Any) -> Any:
    """Traces and lowers a jitted function; returns a `jax.stages.Lowered`."""
    traced = function.trace(*arguments)
    lowered = traced.lower()
    for observer in observers:
        observer.lowered(lowered, traced.jaxpr)
    return lowered


def compiled(key: Any, lower: Callable[[], Any]) -> Callable:
    """Traces and compiles a function, and logs its key and the seconds of both.

    Args:
      key: identifies the function, such as a `StepShape`.
      lower: traces it; returns a `jax.stages.Lowered`.

    Raises:
      NotImplementedError: the device's compiler lacks an operation; the message names it.
    """
    return _traced(key, lower)()


def compile_all(functions: Mapping[Any, Callable[[], Any]], workers: int) -> dict[Any, Callable]:
    """Compiles functions with `workers` threads; the arguments of each are as for `compiled`.

    All are traced by the calling thread, whose jax settings may be thread-local.
    """
    if workers == 1:
        return {key: compiled(key, lower) for key, lower in _watched(functions)}
    with ThreadPoolExecutor(workers) as pool:
        try:
            compiling = {key: pool.submit(_traced(key, lower)) for key, lower in functions.items()}
            return {key: future.result() for key, future in _watched(compiling)}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _watched(functions: Mapping[Any, T]) -> Iterator[tuple[Any, T]]:
    for number, item in enumerate(functions.items(), 1):
        for watcher in watchers:
            watcher(number, len(functions))
        yield item


def _traced(key: Any, lower: Callable[[], Any]) -> Callable[[], Callable]:
    """Traces a function; returns a function that compiles it."""
    began = time.perf_counter()
    lowered = lower()
    return functools.partial(_compile, key, lowered, time.perf_counter() - began)


def _compile(key: Any, lowered: Any, traced_s: float) -> Callable:
    began = time.perf_counter()
    try:
        function = lowered.compile()
    except RuntimeError as error:
        if not str(error).startswith("UNIMPLEMENTED"):
            raise
        raise NotImplementedError(f"the device's compiler refuses {key}: {' '.join(str(error).split())}") from error
    compiled_s = time.perf_counter() - began
    logger.info("compiled %s in %.2f s, traced in %.2f s", key, compiled_s, traced_s)
    for observer in observers:
        observer.compiled(key, lowered, function, traced_s, compiled_s)
    return function
