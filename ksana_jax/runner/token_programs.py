"""Functions under jit that turn hidden states into tokens and scores, and the shapes of their settings."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.request import MAX_LOGPROBS
from ksana_jax.sampling.sampler import sample, score
from ksana_jax.step.contract import SamplingArrays

# Maximum number of prompt tokens whose scores over the whole vocabulary are computed at a time.
SCORED_AT_ONCE = 128


def sampling_shapes(size: int, vocab_size: int | None) -> Any:
    """Returns the shapes of SamplingArrays; with penalties and biases if a vocabulary size is given."""

    def array(dtype, *more: int) -> Any:
        return jax.ShapeDtypeStruct((size, *more), dtype)

    f32, i32 = array(jnp.float32), array(jnp.int32)
    settings = SamplingArrays(f32, i32, f32, f32, array(jnp.uint32, 2), i32, f32, f32, f32)
    if vocab_size is None:
        return settings
    counts, in_prompt, bias = (array(dtype, vocab_size) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
    return settings._replace(counts=counts, in_prompt=in_prompt, bias=bias)


def bucket_of_top(count: int, vocab_size: int) -> int:
    return 0 if count == 0 else min(MAX_LOGPROBS, vocab_size)


def choose_tokens(params, hidden, sampling, *, logits, count, num_top):
    scores_SV = logits(params, hidden[:count])
    tokens = sample(scores_SV, sampling)
    scores = None if num_top is None else score(scores_SV, tokens, num_top)
    # Of one size, because the next step may take its tokens from there.
    return jnp.pad(tokens, (0, hidden.shape[0] - count)), scores


def score_tokens(params, hidden, targets, *, logits, num_top):
    group = math.gcd(hidden.shape[0], SCORED_AT_ONCE)
    if group < 16:
        group = hidden.shape[0]
    parts = jax.lax.map(
        lambda part: score(logits(params, part[0]), part[1], num_top),
        (hidden.reshape(-1, group, hidden.shape[-1]), targets.reshape(-1, group)),
    )
    return jax.tree.map(lambda x: x.reshape(hidden.shape[0], *x.shape[2:]), parts)
