"""Transfers a step to the device and back: its arrays in one vector of int32 each way.

Knows how arrays are packed and fetched, not how they are computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.core.request import MAX_LOGPROBS
from ksana_jax.kv.layout import KVLayout
from ksana_jax.kv.moves import Moves
from ksana_jax.sampling.acceptance import num_before
from ksana_jax.scheduler.step.drafts import Drafts
from ksana_jax.scheduler.step.types import Part, StepArrays, StepInput, StepOutput, StepShape

_NO_TOKENS = np.zeros(0, np.int32)


class Packing:
    """The places of some arrays in one vector.

    Args:
      like: a pytree of the arrays, or of their shapes; of int32, or other types of 32 bits, which keep their bits.

    Attributes:
      size: length of the vector.
    """

    def __init__(self, like: Any):
        leaves, self._structure = jax.tree.flatten(like)
        self._places, self.size = [], 0
        for leaf in leaves:
            begin, dtype = self.size, np.dtype(leaf.dtype)
            assert dtype.itemsize == 4, "an array of other than 32 bits cannot be packed"
            self.size += math.prod(leaf.shape)
            self._places.append((slice(begin, self.size), None if dtype == np.int32 else dtype, leaf.shape))

    def _parts(self, vector: Any) -> list[Any]:
        found = []
        for place, dtype, shape in self._places:
            part = vector[place]
            found.append((part if dtype is None else part.view(dtype)).reshape(shape))
        return found

    def unpack(self, vector: Any) -> Any:
        """Returns the pytree of arrays in a vector [size] of NumPy, as views, or of jax, under jit too."""
        return jax.tree.unflatten(self._structure, self._parts(vector))

    def pack(self, arrays: Any) -> np.ndarray:
        """Returns NumPy arrays, a pytree like `like`, as a vector [size]. The last ones may be missing, and any may be
        shorter along the first axis: the rest of the vector is undefined."""
        vector = np.empty(self.size, np.int32)
        for array, place in zip(jax.tree.leaves(arrays), self._parts(vector), strict=False):
            place[: len(array)] = array
        return vector


def packed(arrays: Any) -> jax.Array:
    """Returns the vector of a pytree of jax arrays, in the order of their `Packing`, under jit."""
    parts = [x.reshape(-1).view(jnp.int32) for x in jax.tree.leaves(arrays)]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def array_shapes(shape: StepShape, layout: KVLayout) -> StepArrays:
    """Returns the shapes of the arrays of a step, whose tokens are ids."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    groups, tokens, width = len(layout.groups), shape.num_tokens, shape.table_width
    tables = ints((groups, shape.num_tiles, width))
    arrays = StepArrays(
        ints((tokens,)),
        ints((tokens,)),
        ints((groups, tokens)),
        ints((groups, tokens)),
        tables,
        tables,
        ints((shape.max_sampled,)),
    )
    if shape.shared_rows:
        shared = ints((groups, shape.num_groups, width))
        arrays = arrays._replace(shared_tables=shared, shared_starts=shared)
    if layout.numbers_queries is not None:
        arrays = arrays._replace(query_numbers=jax.ShapeDtypeStruct((groups, tokens), jnp.float32))
    if layout.sealed is not None:
        arrays = arrays._replace(full_blocks=ints((groups, shape.most_full(layout.block_size))))
    if shape.tree:
        arrays = arrays._replace(ancestors=ints((tokens,)))
    return arrays


def bucket_of_top(count: int, vocab_size: int) -> int:
    """Returns the bucket for a number of most probable tokens whose scores are reported."""
    return 0 if count == 0 else min(MAX_LOGPROBS, vocab_size)


class PackedStep(NamedTuple):
    """One step; see `StepInput`.

    vector: arrays and sampling settings, see `Runner.packed`.
    samples: True with sampling settings. dense: counts, in_prompt and bias of `SamplingArrays`, or None.
    num_top, num_prompt_top: most probable tokens to report of sampled tokens and of prompts; None scores nothing.
    rows: [T, D] embedded tokens if the embedding is on the host; otherwise None.
    drafts, acceptance: see `StepInput`. slots: [Gk, T] of its tokens, if drafts have parents.
    """

    shape: StepShape
    vector: np.ndarray
    num_sampled: int
    samples: bool
    dense: Any
    num_top: int | None
    targets: np.ndarray | None
    num_prompt_top: int
    moves: Moves | None
    rows: Any = None
    drafts: Drafts | None = None
    acceptance: str = "sampled"
    slots: np.ndarray | None = None

    @classmethod
    def of(cls, step: StepInput, vector: np.ndarray, rows: Any, vocab_size: int) -> PackedStep:
        """Returns a step with its arrays as a vector."""
        sampling = step.sampling
        return cls(
            step.shape,
            vector,
            step.num_sampled,
            sampling is not None,
            None if sampling is None or sampling.counts is None else tuple(sampling[-3:]),
            None if step.num_logprobs is None else bucket_of_top(step.num_logprobs, vocab_size),
            step.targets,
            bucket_of_top(step.num_prompt_logprobs, vocab_size),
            step.moves,
            rows,
            step.drafts,
            step.acceptance,
            step.arrays.slots if step.drafts is not None and step.drafts.parents is not None else None,
        )


class Fetched:
    """Arrays on the device in one vector, on their way to the host."""

    def __init__(self, vector: jax.Array, packing: Packing):
        self.vector, self.packing = vector, packing
        vector.copy_to_host_async()

    def result(self) -> Any:
        """Waits for the arrays; returns them as the packing's pytree."""
        return self.packing.unpack(np.asarray(self.vector))


class FetchedVerification(NamedTuple):
    """The result of `verify_tokens`, on its way to the host. part: the tiles of the step's rows."""

    report: Fetched
    part: Part

    def result(self) -> Any:
        """Waits for it; returns (tokens, num_accepted, sampled, scores) of `StepOutput`."""
        tokens, accepted, sampled, scores = self.report.result()
        used = self.part.count * self.part.width
        if len(accepted) > self.part.count:
            accepted = num_before(accepted[:used].reshape(self.part))
        return tokens[:used], accepted, sampled, scores


class FetchedStep(NamedTuple):
    """The report of one step of a loop, on its way to the host with the other reports."""

    reports: Fetched
    step: int

    def result(self) -> Any:
        """Waits for all steps; returns the arrays of this one as the packing's pytree."""
        return self.reports.packing.unpack(np.asarray(self.reports.vector)[self.step])


class Submitted(NamedTuple):
    """A step that the device is computing; see `step.types.Pending`.

    tokens: (tokens, their `TokenScores` or None), with drafts (tokens, num_accepted, sampled, scores) of `StepOutput`;
      None if none are sampled.
    finish_moves: host work that remains for moves before the step; None without any.
    prompt_scores: `TokenScores`, or None.
    compiled: True if a program was compiled for the step.
    drawn_from: of the first step of a loop, the distributions of all steps on the device, see `LoopKey`.
    """

    finish_moves: Callable[[], None] | None
    move_s: float
    tokens: Fetched | FetchedVerification | FetchedStep | None = None
    prompt_scores: Fetched | None = None
    compiled: bool = False
    drawn_from: Any = None

    def of_loop(self, reports: Fetched, count: int) -> list[Submitted]:
        """Returns the steps of a loop, beginning with this one, without its tokens. reports: of all of them."""
        others = [Submitted(None, 0.0, FetchedStep(reports, at)) for at in range(1, count)]
        return [self._replace(tokens=FetchedStep(reports, 0)), *others]

    def result(self) -> StepOutput:
        if self.finish_moves is not None:
            self.finish_moves()  # while the device computes
        tokens, *of_drafts, scores = (_NO_TOKENS, None) if self.tokens is None else self.tokens.result()
        prompt_scores = None if self.prompt_scores is None else self.prompt_scores.result()
        return StepOutput(tokens, scores, prompt_scores, self.move_s, self.compiled, *of_drafts)
