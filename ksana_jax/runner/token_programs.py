"""Functions under jit that turn hidden states into the next tokens, and the shapes of their settings."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.request import MAX_LOGPROBS
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import Params
from ksana_jax.models.transformer import logits
from ksana_jax.runner.compiling import lower
from ksana_jax.runner.transfer import Packing, packed
from ksana_jax.sampling.masks import mask_shape, masked
from ksana_jax.sampling.probabilities import score
from ksana_jax.sampling.sampler import sample
from ksana_jax.sampling.vocabulary import Vocabulary
from ksana_jax.scheduler.step.settings import SamplingArrays
from ksana_jax.scheduler.step.types import TokenScores
from ksana_jax.sharding.placement import Placement


def bucket_of_top(count: int, vocab_size: int) -> int:
    """Returns the bucket for a number of most probable tokens whose scores are reported."""
    return 0 if count == 0 else min(MAX_LOGPROBS if count <= MAX_LOGPROBS else count, vocab_size)


def sampling_shapes(size: int, vocab_size: int | None) -> Any:
    """Returns the shapes of SamplingArrays; with penalties and biases if a vocabulary size is given."""

    def array(dtype, *more: int) -> Any:
        return jax.ShapeDtypeStruct((size, *more), dtype)

    f32, i32 = array(jnp.float32), array(jnp.int32)
    settings = SamplingArrays(f32, i32, f32, f32, array(jnp.uint32, 2), i32, f32, f32, f32, i32)
    if vocab_size is None:
        return settings
    counts, in_prompt, bias = (array(dtype, vocab_size) for dtype in (jnp.int32, jnp.bool_, jnp.float32))
    return settings._replace(counts=counts, in_prompt=in_prompt, bias=bias)


@functools.cache
def settings_packing(max_sampled: int) -> Packing:
    """Returns how the sampling settings of max_sampled tokens are packed, without penalties and biases."""
    return Packing(sampling_shapes(max_sampled, None))


@functools.cache
def report_packing(count: int, num_top: int | None) -> Packing:
    """Returns how the host gets `count` tokens, and their `TokenScores` if num_top is given; see `choose_tokens`."""
    return Packing(
        (jax.ShapeDtypeStruct((count,), jnp.int32), None if num_top is None else score_shapes(count, num_top))
    )


def score_shapes(count: int, num_top: int) -> TokenScores:
    """Returns the shapes of the scores of `count` tokens."""

    def array(dtype, *more: int) -> Any:
        return jax.ShapeDtypeStruct((count, *more), dtype)

    f32, i32 = jnp.float32, jnp.int32
    return TokenScores(array(f32), array(i32), array(i32, num_top), array(f32, num_top))


@dataclasses.dataclass(frozen=True)
class OutputHead:
    """Scores of the vocabulary, and the program that chooses tokens by them.

    config: of the model. operators, placement: of its network. vocabulary: for sampling, on the devices.
    """

    config: ModelConfig
    operators: Operators
    placement: Placement
    vocabulary: Vocabulary

    def __call__(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Returns the scores [..., V] of hidden states [..., D]; on one device, scores of its ids."""
        scores = logits(params, hidden, config=self.config, linear=self.operators.linear)
        return self.vocabulary.without_padding(scores)


def lower_choice(
    params: Params,
    hidden,
    *,
    head: OutputHead,
    count: int,
    samples: bool,
    dense: bool,
    masks: bool,
    num_top: int | None,
) -> Any:
    """Lowers `choose_tokens`; arguments as in `Runner.compile_sampler`."""
    run = head.placement.jit(functools.partial(choose_tokens, head=head, count=count, num_top=num_top))
    settings = jax.ShapeDtypeStruct((settings_packing(hidden.shape[0]).size,), jnp.int32) if samples else None
    given = sampling_shapes(count, head.config.vocab_size)[-3:] if dense else None
    mask = mask_shape(count, head.config.vocab_size) if masks else None
    return lower(run, params, hidden, settings, given, mask)


def sampling_of(settings, dense, hidden, count: int, head: OutputHead) -> SamplingArrays | None:
    """Returns the sampling settings of the first `count` of hidden [J, D]; arguments as `choose_tokens` has them."""
    if settings is None:
        return None
    settings = settings_packing(hidden.shape[0]).unpack(settings)
    given = map(head.vocabulary.own, dense or ())
    return SamplingArrays(*(x[:count] for x in jax.tree.leaves(settings)), *given)


def choose_tokens(params, hidden, settings, dense, mask=None, *, head: OutputHead, count: int, num_top: int | None):
    """Chooses a token for each of the first `count` of hidden [J, D].

    Args:
      settings: vector of `settings_packing`; None chooses the most probable tokens.
      dense: counts, in_prompt and bias of `SamplingArrays`, of `count` tokens; None without penalties and biases.
      mask: of `StepInput`.

    Returns:
      The tokens [J], padded, and a vector of `report_packing`.
    """
    # This name separates these operations from layers in a program that also computes layers.
    with jax.named_scope("choice"):
        scores_SV = head(params, hidden[:count])
        if mask is not None:
            scores_SV = masked(scores_SV, mask, head.vocabulary)
        tokens = sample(scores_SV, sampling_of(settings, dense, hidden, count, head), head.vocabulary)
        scores = () if num_top is None else score(scores_SV, tokens, num_top, head.vocabulary)
        # One fixed size, because the next step may take its tokens from there.
        return jnp.pad(tokens, (0, hidden.shape[0] - count)), packed((tokens, scores))
