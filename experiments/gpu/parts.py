"""The Hopper kernel for decode in its two parts: attention of segments, and their merge, each alone in a chain."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu.candidates import Candidate
from experiments.gpu.cases import Arguments, Case
from pallas_kernels.hopper import decode as hopper_decode
from pallas_kernels.patterns import Pattern

ATTENTION, MERGE = "hopper, attention alone", "hopper, merge alone"


def parts(case: Case) -> list[Candidate]:
    """Both parts on a case."""
    pattern = Pattern(*case.pattern)
    # Without jit of its own, whose trace would be kept.
    whole: Callable[..., Any] = inspect.unwrap(hopper_decode.attend)

    def attend(arrays: Arguments, layer) -> jax.Array:
        return whole(arrays.call(layer=layer, pattern=pattern), tuning=hopper_decode.KERNEL.tuning).out

    layers = tuple(jnp.int32(layer) for layer in range(case.num_layers))

    def attention_alone(q, shared, layer):
        def no_merge(partial, partial_lse, work, sinks, out, lse, interpret):
            return out, lse

        with _in_place_of("merge_segments", no_merge):
            return attend(Arguments(q, *shared), layer)

    def segments(a: Arguments):
        found = []

        def keeps(partial, partial_lse, work, sinks, out, lse, interpret):
            found.extend((partial, partial_lse))
            return out, lse

        with _in_place_of("merge_segments", keeps):
            attend(a, 0)
        return a.q, (a[1:], tuple(found)), layers

    def merge_alone(q, shared, layer):
        arrays, (partial, partial_lse) = shared

        def no_attention(packed, *arguments: Any):
            # Fed by the call before, or XLA would make one call of them all: one small addition. The merge completes
            # the queries, which have the result's shape.
            results = arguments[-2]
            log = partial_lse + q[0, 0, 0, 0].astype(jnp.float32) * 1e-30
            out = packed[:, : results.shape[1]].astype(results.dtype)
            return partial, log, out, log[: len(out)]

        with _in_place_of("attend_segments", no_attention):
            return attend(Arguments(q, *arrays), layer)

    return [
        Candidate(ATTENTION, lambda a: (a.q, a[1:], layers), attention_alone, ours=True, part=True),
        Candidate(MERGE, segments, merge_alone, ours=True, part=True, layout="segments of hopper"),
    ]


@contextlib.contextmanager
def _in_place_of(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A function of Hopper's decode of a name replaced while something is traced."""
    kept = getattr(hopper_decode, name)
    setattr(hopper_decode, name, function)
    try:
        yield
    finally:
        setattr(hopper_decode, name, kept)


def on_this_device(case: Case) -> list[Candidate]:
    """The parts where the kernel can run."""
    return parts(case) if jax.default_backend() == "gpu" else []
