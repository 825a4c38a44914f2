"""Compiles functions ahead of time or finds them in the store, logs each and notifies observers. Knows no steps."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias, TypeVar

import jax

from ksana_jax.runner.program_key import Lowering
from ksana_jax.runner.store import Place, places
from ksana_jax.runner.stored_program import compile_to_keep

T = TypeVar("T")
# Traces a function; returns a function that compiles it.
Tracing: TypeAlias = Callable[[], Callable[[], Callable]]

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
    found, missing = sought({key: lower})
    return found.get(key) or missing[key]()()


def compile_all(functions: Mapping[Any, Lowering], workers: int) -> dict[Any, Callable]:
    """Compiles functions with `workers` threads; the arguments of each are as for `compiled`.

    All are traced by the calling thread, whose jax settings may be thread-local.
    """
    found, missing = sought(functions)
    if workers == 1:
        return found | {key: trace()() for key, trace in _watched(missing)}
    with ThreadPoolExecutor(workers) as pool:
        try:
            compiling = {key: pool.submit(trace()) for key, trace in missing.items()}
            return found | {key: future.result() for key, future in _watched(compiling)}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def sought(functions: Mapping[Any, Lowering]) -> tuple[dict[Any, Callable], dict[Any, Tracing]]:
    """Looks functions up in the store; their arguments are as for `compiled`.

    Returns:
      Those in the store, neither traced nor compiled, and how to trace the others. Neither keeps arrays alive.
    """
    known: dict[int, Any] = {}
    functions = {key: of_shapes(lower, known) for key, lower in functions.items()}
    at = {} if observers else places(functions)  # observers read what is lowered
    found = {key: program for key, place in at.items() if (program := place.read()) is not None}
    for key in found:
        logger.info("found %s compiled", key)
    missing = {key: lower for key, lower in functions.items() if key not in found}
    return found, {key: functools.partial(_traced, key, lower, at.get(key)) for key, lower in missing.items()}


def of_shapes(lower: Lowering, known: dict[int, Any]) -> Lowering:
    """Returns a function's lowering without arrays, which it would keep alive.

    Args:
      known: shapes of trees that were met, by id.
    """
    for tree in lower.args:
        known[id(tree)] = known.get(id(tree)) or jax.tree.map(shape_of, tree)
    return type(lower)(lower.func, *(known[id(tree)] for tree in lower.args), **lower.keywords)


def shape_of(x: Any) -> Any:
    """Returns the shape of an array, which lowers to the same program."""
    sharding = x.sharding if getattr(x, "committed", isinstance(x, jax.ShapeDtypeStruct)) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))


def _watched(functions: Mapping[Any, T]) -> Iterator[tuple[Any, T]]:
    for number, item in enumerate(functions.items(), 1):
        for watcher in watchers:
            watcher(number, len(functions))
        yield item


def _traced(key: Any, lower: Lowering, place: Place | None) -> Callable[[], Callable]:
    """Traces a function; returns a function that compiles it."""
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
