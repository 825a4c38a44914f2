"""Transfers a step to the device and back: its arrays in one vector of int32 each way.

Knows how arrays are packed and fetched, not how they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.scheduler.step.types import NO_TOKENS, StepOutput


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


class Fetched:
    """Arrays on the device in one vector, on their way to the host."""

    def __init__(self, vector: jax.Array, packing: Packing):
        self.vector, self.packing = vector, packing
        vector.copy_to_host_async()

    def result(self) -> Any:
        """Waits for the arrays; returns them as the packing's pytree."""
        return self.packing.unpack(np.asarray(self.vector))


def started(
    tokens: Callable[[], Any] | None,
    prompt_scores: Callable[[], Any] | None = None,
    finish_moves: Callable[[], None] | None = None,
    move_s: float = 0.0,
    compiled: bool = False,
) -> StepOutput:
    """Returns the output of a step that the device is computing.

    Args:
      tokens: waits for the device and returns (tokens, their `TokenScores` or None), with drafts (tokens,
        num_accepted, sampled, scores) of `StepOutput`; None if none are sampled.
      finish_moves: host work that remains for moves before the step; None without any.
      prompt_scores: waits for `TokenScores`, or None. compiled: True if a program was compiled for the step.
    """

    def fetch(output: StepOutput) -> None:
        if finish_moves is not None:
            finish_moves()  # while the device computes
        if tokens is not None:
            output.tokens, *of_drafts, output.scores = tokens()
            if of_drafts:
                output.num_accepted, output.sampled = of_drafts
        if prompt_scores is not None:
            output.prompt_scores = prompt_scores()

    return StepOutput(NO_TOKENS, move_s=move_s, compiled=compiled, fetch=fetch)
