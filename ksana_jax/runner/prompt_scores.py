"""Scores prompt tokens under jit: the log-probability of each token after those before it."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.models.params import Params
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.token_programs import OutputHead, score_shapes
from ksana_jax.runner.transfer import Packing, packed
from ksana_jax.sampling.probabilities import score

# Maximum number of tokens whose scores over the whole vocabulary are computed at a time.
SCORED_AT_ONCE = 128


@functools.cache
def scores_packing(count: int, num_top: int) -> Packing:
    """Returns how the host gets the `TokenScores` of `score_tokens`."""
    return Packing(score_shapes(count, num_top))


def lower_scores(params: Params, *, head: OutputHead, num_tokens: int, num_top: int) -> Any:
    """Lowers `score_tokens` for prompts of num_tokens tokens in a step."""
    hidden = jax.ShapeDtypeStruct((num_tokens, head.config.d_model), params.final_norm.dtype)
    targets = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    run = head.placement.jit(functools.partial(score_tokens, head=head, num_top=num_top))
    return lower(run, params, hidden, targets)


def score_tokens(params, hidden, targets, *, head: OutputHead, num_top: int):
    """Scores the token that follows each of hidden [T, D]; returns a vector of `scores_packing`."""
    group = math.gcd(hidden.shape[0], SCORED_AT_ONCE)
    if group < 16:
        group = hidden.shape[0]
    parts = jax.lax.map(
        lambda part: score(head(params, part[0]), part[1], num_top, head.vocabulary),
        (hidden.reshape(-1, group, hidden.shape[-1]), targets.reshape(-1, group)),
    )
    return packed(parts)
