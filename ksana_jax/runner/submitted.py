"""A step that the device is computing, and what the host waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ksana_jax.runner.packing import Packing
from ksana_jax.sampling.acceptance import num_before
from ksana_jax.step.contract import Part, StepOutput

_NO_TOKENS = np.zeros(0, np.int32)


class Fetched:
    """Arrays on the device in one vector, on their way to the host."""

    def __init__(self, vector: jax.Array, packing: Packing):
        self.vector, self.packing = vector, packing
        vector.copy_to_host_async()

    def result(self) -> Any:
        """Waits for the arrays; returns them as the packing's pytree."""
        return self.packing.unpack(np.asarray(self.vector))


class FetchedVerification(NamedTuple):
    """What `verify_tokens` returns, on its way to the host. part: the tiles of the step's rows."""

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
    """The report of one step of a loop, on its way to the host with those of the others."""

    reports: Fetched
    step: int

    def result(self) -> Any:
        """Waits for all steps; returns the arrays of this one as the packing's pytree."""
        return self.reports.packing.unpack(np.asarray(self.reports.vector)[self.step])


class Submitted(NamedTuple):
    """A step that the device is computing; see `step.Pending`.

    tokens: (tokens, their `TokenScores` or None), with drafts (tokens, num_accepted, sampled, scores) of `StepOutput`;
      None if none are sampled.
    prompt_scores: `TokenScores`, or None.
    compiled: whether a program was compiled for the step.
    drawn_from: of the first step of a loop, the distributions of all steps on the device, see `LoopKey`.
    """

    finish_moves: Callable[[], None]
    move_s: float
    tokens: Fetched | FetchedVerification | FetchedStep | None
    prompt_scores: Fetched | None
    compiled: bool = False
    drawn_from: Any = None

    def result(self) -> StepOutput:
        self.finish_moves()  # while the device computes
        tokens, *of_drafts, scores = (_NO_TOKENS, None) if self.tokens is None else self.tokens.result()
        prompt_scores = None if self.prompt_scores is None else self.prompt_scores.result()
        return StepOutput(tokens, scores, prompt_scores, self.move_s, self.compiled, *of_drafts)
