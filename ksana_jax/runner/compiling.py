"""Compiles functions ahead of time or finds them in the store, logs each and notifies observers. Knows no steps."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from ksana_jax.runner.program_key import Lowering
from ksana_jax.runner.store import Place, places
from ksana_jax.runner.stored_program import compile_to_keep

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


def compiled(key: Any, lower: Lowering) -> Callable:
    """Returns a function from the store, or traces and compiles it, and logs its key and the seconds of both.

    Args:
      key: identifies the function, such as a `StepShape`.

    Raises:
      NotImplementedError: the device's compiler lacks an operation; the message names it.
    """
    return _traced(key, lower, _places({key: lower}).get(key))()


def compile_all(functions: Mapping[Any, Lowering], workers: int) -> dict[Any, Callable]:
    """Compiles functions with `workers` threads; the arguments of each are as for `compiled`.

    All are traced by the calling thread, whose jax settings may be thread-local.
    """
    places = _places(functions)
    if workers == 1:
        return {key: _traced(key, lower, places.get(key))() for key, lower in _watched(functions)}
    with ThreadPoolExecutor(workers) as pool:
        try:
            compiling = {key: pool.submit(_traced(key, lower, places.get(key))) for key, lower in functions.items()}
            return {key: future.result() for key, future in _watched(compiling)}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _places(functions: Mapping[Any, Lowering]) -> Mapping[Any, Place]:
    return {} if observers else places(functions)  # observers read what is lowered


def _watched(functions: Mapping[Any, T]) -> Iterator[tuple[Any, T]]:
    for number, item in enumerate(functions.items(), 1):
        for watcher in watchers:
            watcher(number, len(functions))
        yield item


def _traced(key: Any, lower: Lowering, place: Place | None) -> Callable[[], Callable]:
    """Traces a function; returns a function that compiles it. One of the store is neither traced nor compiled."""
    if place is not None and (found := place.read()) is not None:
        logger.info("found %s compiled", key)
        return lambda: found
    began = time.perf_counter()
    lowered = lower()
    return functools.partial(_compile, key, lower, lowered, time.perf_counter() - began, place)


def _compile(key: Any, lower: Lowering, lowered: Any, traced_s: float, place: Place | None) -> Callable:
    began, parts = time.perf_counter(), lower.parts(lowered)
    try:
        made = [(part.compile(), None) if place is None else compile_to_keep(part) for part in parts]
    except RuntimeError as error:
        if not str(error).startswith("UNIMPLEMENTED"):
            raise
        raise NotImplementedError(f"the device's compiler refuses {key}: {' '.join(str(error).split())}") from error
    compiled_s = time.perf_counter() - began
    logger.info("compiled %s in %.2f s, traced in %.2f s", key, compiled_s, traced_s)
    if place is not None:
        place.write(parts, made)
    function = lower.assembled([program for program, _ in made])
    for observer in observers:
        observer.compiled(key, lowered, function, traced_s, compiled_s)
    return function
