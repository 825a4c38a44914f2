"""Several decode steps as one program: a loop on the device over steps of one shape, each with its sampling inside.

The host prepares the arrays of all steps; only tokens go from one to the next.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ksana_jax.runner.compiling import lower
from ksana_jax.runner.packing import Packing
from ksana_jax.runner.step_program import Network, step_packed
from ksana_jax.runner.token_programs import OutputHead, choose_tokens, drawn_with
from ksana_jax.step.contract import StepShape


class LoopKey(NamedTuple):
    """What a loop is compiled for, by which the runner keeps it.

    samples: whether there are sampling settings. num_top: most probable tokens to score; None scores nothing.
    distributions: whether the probabilities that tokens were drawn with are wanted; with samples only.
    """

    shape: StepShape
    num_steps: int
    samples: bool
    num_top: int | None
    distributions: bool = False


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
    """Lowers a loop as one program: (params, cache, vectors [steps, n], given [J], patterns) -> (cache, tokens [J] of
    the last step, reports [steps, m], each as `choose_tokens` returns it, and distributions [steps, J, V] or None).

    Args:
      arguments: of one step, as `lower_whole` takes them.
    """
    params, cache, vector, given, patterns = arguments
    vectors = jax.ShapeDtypeStruct((key.num_steps, *vector.shape), vector.dtype)
    run = network.jit_donating(run_loop, 4, key=key, alike=alike, packing=packing, head=head)
    return lower(run, params, cache, vectors, given, patterns)


def run_loop(params, cache, vectors, given, patterns, *, network: Network, key: LoopKey, alike, packing, head):
    step = functools.partial(step_packed, network=network, shape=key.shape, alike=alike, packing=packing)
    choose = functools.partial(choose_tokens, head=head, count=key.shape.num_tokens, num_top=key.num_top)

    def body(carry, vector):
        cache, given = carry
        cache, _, sampled, settings = step(params, cache, vector, given, patterns)
        settings = settings if key.samples else None
        tokens, report = choose(params, sampled, settings, None)
        drawn_from = drawn_with(params, sampled, settings, head, key.shape.num_tokens) if key.distributions else None
        return (cache, tokens), (report, drawn_from)

    (cache, given), (reports, drawn_from) = jax.lax.scan(body, (cache, given), vectors)
    return cache, given, reports, drawn_from
