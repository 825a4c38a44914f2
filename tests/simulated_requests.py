"""Requests of random simulations, see `tests.simulation`: texts that share beginnings, and settings of all kinds."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from ksana_jax.core.request import SamplingParams
from ksana_jax.engine.engine import Engine
from tests.expected import LONGEST
from tests.fakes import asking, prompt_of


@dataclasses.dataclass
class Expected:
    """What a request must end with: tokens of each completion; of beams their log-probabilities too."""

    tokens: list[list[int]]
    logprobs: list[float] | None
    salt: str


def _text(branch: int, leaves: int) -> np.ndarray:
    return np.concatenate([prompt_of(LONGEST)[:leaves], prompt_of(LONGEST, branch)[leaves:]])


TEXTS = [_text(branch, leaves) for branch, leaves in enumerate((LONGEST, 0, 9, 22))]


def drawn_params(rng: random.Random) -> SamplingParams:
    """Settings of a request without beams."""
    max_tokens, scores = rng.randint(1, 24), rng.choice([None, None, None, 0, 2])
    params = asking(
        max_tokens,
        n=rng.choice([1, 1, 1, 2, 3]),
        temperature=rng.choice([0, 0, 1]),
        ignore_eos=rng.random() < 0.5,
        min_tokens=min(rng.choice([0, 0, 5]), max_tokens),
        logprobs=scores,
        prompt_logprobs=scores,
    )
    # Not drawn: seeds of earlier simulations keep their meaning. Some continuations are shorter than max_tokens.
    if params.min_tokens or max_tokens % 4:
        return params
    count = max_tokens + (2 if scores else -2)
    return dataclasses.replace(params, forced_token_ids=TEXTS[max_tokens // 4 % len(TEXTS)][:count].tolist())


def refusal_of(engine: Engine, prompt: np.ndarray, params: SamplingParams) -> str:
    """The error with which an engine refuses a request that it can never serve."""
    try:
        engine.add_request(prompt, params)
    except ValueError as error:
        return str(error)
    raise AssertionError("a request that can never be served was taken in")


def drawn_beams(rng: random.Random) -> SamplingParams:
    """Settings of a beam search."""
    return asking(
        rng.randint(1, 8),
        beam_width=(width := rng.randint(1, 3)),
        n=rng.randint(1, width),
        length_penalty=rng.choice([0.0, 1.0, 2.0]),
        ignore_eos=rng.random() < 0.5,
    )
