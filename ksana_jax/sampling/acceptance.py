"""Rules by which draft tokens are accepted. Pure functions under jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def accept_sampled(tokens: jax.Array, ids: jax.Array, counts: jax.Array) -> jax.Array:
    """Accepts draft tokens up to the first that differs from what the model has sampled in its place.

    The tokens sampled up to there, and the one that differs from the draft, are those of plain decoding: each was drawn
    from the model's distribution after the text before it, with the random numbers of its place. The one that differs
    must not be drawn again, or the drafts would bias it.

    Args:
      tokens: [R, K + 1] sampled after each row's newest token and after each of its draft tokens.
      ids: [R, K] draft tokens. counts: [R] how many of them there are.

    Returns:
      [R] number of accepted draft tokens.
    """
    same = (tokens[:, :-1] == ids) & (jnp.arange(ids.shape[1]) < counts[:, None])
    return jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=1), axis=1)
