"""Masks of the tokens that may be sampled, under jit. Knows no grammars."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ksana_jax.sampling.vocabulary import WHOLE, Vocabulary


def mask_shape(size: int, vocab_size: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of `StepInput.mask` for `size` tokens."""
    return jax.ShapeDtypeStruct((size, -(-vocab_size // 32)), jnp.int32)


def masked(logits_SV: jax.Array, mask: jax.Array, vocabulary: Vocabulary = WHOLE) -> jax.Array:
    """Returns scores with -inf for the tokens that a mask [S, ceil(V / 32)] of `StepInput` forbids.

    Penalties, biases and truncation leave -inf as it is, so that what is sampled, accepted or reported keeps to it.
    """
    ids = jnp.arange(vocabulary.size(logits_SV))
    allowed = (jnp.repeat(mask, 32, axis=1)[:, : len(ids)] >> (ids % 32)) & 1
    return jnp.where(vocabulary.own(allowed) == 1, logits_SV, -jnp.inf)
