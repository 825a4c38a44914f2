"""Decode steps with their sampling inside, as one program: a single step, or a loop on the device over several of one
shape.

The host prepares the arrays of all steps; only tokens pass from one to the next.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.runner.compiling import lower
from ksana_jax.runner.network import Network
from ksana_jax.runner.step_program import step_packed
from ksana_jax.runner.token_programs import OutputHead, bucket_of_top, choose_tokens, report_packing, sampling_of
from ksana_jax.runner.transfer import Fetched, Packing
from ksana_jax.sampling.probabilities import distribution
from ksana_jax.scheduler.step.executor import share_a_call
from ksana_jax.scheduler.step.types import StepInput, StepShape


class LoopKey(NamedTuple):
    """Key of a compiled loop in the runner.

    num_steps: 1 has no loop, only the step and its sampling.
    samples: True with sampling settings. num_top: most probable tokens to score; None scores nothing.
    distributions: True to return the probabilities that tokens were drawn with; with samples only.
    stops: True if it may end early, see `Stop`.
    """

    shape: StepShape
    num_steps: int
    samples: bool
    num_top: int | None
    distributions: bool = False
    stops: bool = False

    @classmethod
    def of(cls, steps: Sequence[StepInput], vocab_size: int, distributions: bool, stop: Stop | None) -> LoopKey:
        """Returns the key of a loop of steps."""
        shape, sampling, top = steps[0].shape, steps[0].sampling, steps[0].num_logprobs
        num_top = None if top is None else bucket_of_top(top, vocab_size)
        return cls(shape, len(steps), sampling is not None, num_top, distributions, stop is not None)


class Stop(NamedTuple):
    """Ends a loop before its last step: once each row has its maximum of tokens, and one step more for the last
    of them, or has sampled a token below its minimum probability.

    most: [T] int32 maximum tokens of each row; -1 for padding. least: [] float32 log-probability, of loops with scores;
      None in others. Skipped steps report zeros.
    """

    most: Any
    least: Any = None


def only_decodes(shape: StepShape) -> bool:
    """True if each tile of a shape is one token."""
    return [part.width for part in shape.parts] == [1]


def serves(step: StepInput) -> bool:
    """True if a program with the sampling inside can compute a step: decodes alone, without drafts, scores of
    prompts, penalties, biases and masks."""
    dense = step.sampling is not None and step.sampling.counts is not None
    return only_decodes(step.shape) and share_a_call([step]) and not dense and step.mask is None


def report_of(reports: Fetched, step: int) -> Any:
    """Waits for all steps of a loop; returns the arrays that one of them reports, as the packing's pytree."""
    return reports.packing.unpack(np.asarray(reports.vector)[step])


def lower_loop(
    *arguments: Any,
    network: Network,
    key: LoopKey,
    alike: Sequence[int],
    packing: Packing,
    head: OutputHead,
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
        stop = Stop(rows, None if key.num_top is None else jax.ShapeDtypeStruct((), jnp.float32))
    vectors = jax.ShapeDtypeStruct((key.num_steps, *vector.shape), vector.dtype)
    run = network.jit_donating(run_loop, 4, key.shape.num_tokens, key=key, alike=alike, packing=packing, head=head)
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

    if key.num_steps == 1 and stop is None:
        (cache, given), of_one = body((cache, given), vectors[0])
        reports, drawn_from = jax.tree.map(lambda x: x[None], of_one)
    elif stop is None:
        (cache, given), (reports, drawn_from) = jax.lax.scan(body, (cache, given), vectors)
    else:
        (cache, given), (reports, drawn_from) = _until(stop, body, (cache, given), vectors, key)
    return cache, given, reports, drawn_from


def drawn_with(params, hidden, settings, head: OutputHead, count: int):
    """Returns the probabilities [J, V] with which `choose_tokens` draws, given the same arguments; 0 after `count`."""
    sampling = sampling_of(settings, None, hidden, count, head)
    assert sampling is not None
    return jnp.pad(distribution(head(params, hidden[:count]), sampling), ((0, len(hidden) - count), (0, 0)))


def _until(stop: Stop, body, carry, vectors, key: LoopKey):
    """Returns the same as `jax.lax.scan`, for the steps until the loop ends."""
    packing = report_packing(key.shape.num_tokens, key.num_top)
    _, of_one = jax.eval_shape(body, carry, vectors[0])
    nothing = jax.tree.map(lambda x: jnp.zeros((key.num_steps, *x.shape), x.dtype), of_one)

    def goes_on(state):
        at, going, *_ = state
        return (at < key.num_steps) & jnp.any(going)

    def step(state):
        at, going, carry, found = state
        carry, new = body(carry, jax.lax.dynamic_index_in_dim(vectors, at, keepdims=False))
        going &= at < stop.most
        if stop.least is not None:
            _, scores = packing.unpack(new[0])
            going &= scores.logprob >= stop.least
        return at + 1, going, carry, jax.tree.map(lambda all_steps, one: all_steps.at[at].set(one), found, new)

    *_, carry, found = jax.lax.while_loop(goes_on, step, (0, stop.most >= 0, carry, nothing))
    return carry, found
