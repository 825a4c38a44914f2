"""The changes made by the tokens of a step, for reporting."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ksana_jax.sequence import Sequence


class StepResult(NamedTuple):
    """Changes that the tokens of a step made.

    rows, tokens: rows that got a token, and the token of each.
    finished: all sequences that ended.
    beams: rows that have computed all their tokens and whose request chooses the next one.
    """

    rows: np.ndarray
    tokens: np.ndarray
    finished: list[Sequence]
    beams: np.ndarray
