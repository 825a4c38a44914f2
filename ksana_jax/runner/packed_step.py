"""A step as a runner computes it: arrays in one vector, and the numbers that choose its programs. Plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.kv.moves import Moves
from ksana_jax.runner.decode_loop import LoopKey, Stop
from ksana_jax.runner.token_programs import VerificationKey
from ksana_jax.sampling.acceptance import rule_of
from ksana_jax.step.contract import StepInput, StepShape
from ksana_jax.step.drafts import Drafts, FlatDrafts


class PackedStep(NamedTuple):
    """One step; see `StepInput`.

    vector: arrays and sampling settings, see `Runner.packed`.
    samples: whether there are sampling settings. dense: counts, in_prompt and bias of `SamplingArrays`, or None.
    num_top, num_prompt_top: most probable tokens to report of sampled tokens and of prompts; None scores nothing.
    rows: [T, D] embedded tokens, where the embedding is on the host; otherwise None.
    drafts, acceptance: see `StepInput`. slots: [Gk, T] of its tokens, where drafts have parents.
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
    def of(cls, step: StepInput, vector: np.ndarray, rows: Any, bucket_of_top: Callable[[int], int]) -> PackedStep:
        """Returns a step with its arrays as a vector.

        Args:
          bucket_of_top: returns the bucket for a number of most probable tokens.
        """
        sampling = step.sampling
        return cls(
            step.shape,
            vector,
            step.num_sampled,
            sampling is not None,
            None if sampling is None or sampling.counts is None else tuple(sampling[-3:]),
            None if step.num_logprobs is None else bucket_of_top(step.num_logprobs),
            step.targets,
            bucket_of_top(step.num_prompt_logprobs),
            step.moves,
            rows,
            step.drafts,
            step.acceptance,
            step.arrays.slots if step.drafts is not None and step.drafts.parents is not None else None,
        )

    @property
    def verification_key(self) -> VerificationKey:
        """What the program that verifies its drafts is compiled for."""
        assert self.drafts is not None
        drawn, tree = self.drafts.drawn_from, self.drafts.parents is not None
        sizes = None if drawn is None else tuple(drawn.shape[:2])
        rule = rule_of(self.acceptance, self.samples)
        return VerificationKey.of(self.shape, self.samples, self.dense is not None, self.num_top, rule, sizes, tree)

    def drafts_for(self, key: VerificationKey) -> Drafts | FlatDrafts:
        """Returns its drafts as the program that verifies them takes them."""
        assert self.drafts is not None
        return self.drafts.flat(key.count) if key.part is None else self.drafts


class PackedLoop(NamedTuple):
    """Decode steps of one call. vectors: [steps, n], see `PackedStep`.

    stop: when it ends early; None for never.
    """

    key: LoopKey
    vectors: np.ndarray
    moves: Moves | None
    stop: Stop | None = None
