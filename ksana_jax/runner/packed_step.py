"""A step as a runner computes it: arrays in one vector, and the numbers that choose its programs. Plain data."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ksana_jax.kv.moves import Moves
from ksana_jax.runner.decode_loop import LoopKey
from ksana_jax.step.contract import StepShape


class PackedStep(NamedTuple):
    """One step; see `StepInput`.

    vector: arrays and sampling settings, see `Runner.packed`.
    samples: whether there are sampling settings. dense: counts, in_prompt and bias of `SamplingArrays`, or None.
    num_top, num_prompt_top: most probable tokens to report of sampled tokens and of prompts; None scores nothing.
    rows: [T, D] embedded tokens, where the embedding is on the host; otherwise None.
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


class PackedLoop(NamedTuple):
    """Decode steps of one call. vectors: [steps, n], see `PackedStep`. num_sampled: of each step."""

    key: LoopKey
    vectors: np.ndarray
    num_sampled: int
    moves: Moves | None
