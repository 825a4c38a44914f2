"""Several decode steps as one program: a loop on the device over steps of one shape, each with its sampling inside.

The host prepares the arrays of all steps; only tokens go from one to the next.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ksana_jax.runner.compiling import lower
from ksana_jax.runner.packing import Packing
from ksana_jax.runner.step_program import Network, step_packed
from ksana_jax.runner.token_programs import OutputHead, choose_tokens, drawn_with, report_packing
from ksana_jax.step.contract import StepShape


class LoopKey(NamedTuple):
    """What a loop is compiled for, by which the runner keeps it.

    samples: whether there are sampling settings. num_top: most probable tokens to score; None scores nothing.
    distributions: whether the probabilities that tokens were drawn with are wanted; with samples only.
    stops: whether it may end early, see `Stop`; with scores, and without distributions.
    """

    shape: StepShape
    num_steps: int
    samples: bool
    num_top: int | None
    distributions: bool = False
    stops: bool = False


class Stop(NamedTuple):
    """When a loop ends before its last step: once each row has sampled a token less probable than it may be, or as many
    tokens as it may.

    least: [] float32 log-probability. most: [T] int32 tokens of each row, which are followed by one step more; -1 for
      padding. Reports of the steps that are left out are zeros.
    """

    least: Any
    most: Any


def only_decodes(shape: StepShape) -> bool:
    """Whether each tile of a shape is one token."""
    return [part.width for part in shape.parts] == [1]


def lower_loop(
    network: Network,
    key: LoopKey,
    alike: Sequence[int],
    packing: Packing,
    head: OutputHead,
    *arguments: Any,
) -> Any:
    """Lowers a loop as one program.

    It takes (params, cache, vectors [steps, n], given [J], patterns, stop) and returns (cache, tokens [J] of the last
    step, reports [steps, m], each as `choose_tokens` returns it, and distributions [steps, J, V] or None).

    Args:
      arguments: of one step, as `lower_whole` takes them.
    """
    params, cache, vector, given, patterns = arguments
    stop = None
    if key.stops:
        rows = jax.ShapeDtypeStruct((key.shape.num_tokens,), jnp.int32)
        stop = Stop(jax.ShapeDtypeStruct((), jnp.float32), rows)
    vectors = jax.ShapeDtypeStruct((key.num_steps, *vector.shape), vector.dtype)
    run = network.jit_donating(run_loop, 4, key=key, alike=alike, packing=packing, head=head)
    return lower(run, params, cache, vectors, given, patterns, stop)


def run_loop(params, cache, vectors, given, patterns, stop, *, network: Network, key: LoopKey, alike, packing, head):
    step = functools.partial(step_packed, network=network, shape=key.shape, alike=alike, packing=packing)
    choose = functools.partial(choose_tokens, head=head, count=key.shape.num_tokens, num_top=key.num_top)

    def body(carry, vector):
        cache, given = carry
        cache, _, sampled, settings = step(params, cache, vector, given, patterns)
        settings = settings if key.samples else None
        tokens, report = choose(params, sampled, settings, None)
        drawn_from = drawn_with(params, sampled, settings, head, key.shape.num_tokens) if key.distributions else None
        return (cache, tokens), (report, drawn_from)

    if stop is None:
        (cache, given), (reports, drawn_from) = jax.lax.scan(body, (cache, given), vectors)
        return cache, given, reports, drawn_from
    return *_until(stop, body, cache, vectors, given, key), None


def _until(stop: Stop, body, cache, vectors, given, key: LoopKey):
    """Runs the steps of a loop until it ends; returns cache, tokens and reports, as `run_loop` does."""
    assert key.num_top is not None and not key.distributions
    packing = report_packing(key.shape.num_tokens, key.num_top)

    def goes_on(state):
        at, going, *_ = state
        return (at < key.num_steps) & jnp.any(going)

    def step(state):
        at, going, carry, reports = state
        carry, (report, _) = body(carry, jax.lax.dynamic_index_in_dim(vectors, at, keepdims=False))
        _, scores = packing.unpack(report)
        going &= (scores.logprob >= stop.least) & (at < stop.most)
        return at + 1, going, carry, reports.at[at].set(report)

    reports = jnp.zeros((key.num_steps, packing.size), jnp.int32)
    *_, (cache, given), reports = jax.lax.while_loop(goes_on, step, (0, stop.most >= 0, (cache, given), reports))
    return cache, given, reports
