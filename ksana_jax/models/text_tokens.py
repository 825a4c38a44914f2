"""The tokens of a step by the texts whose states they read and write in recurrent layers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TextTokens(NamedTuple):
    """The tokens [T] of a step by text.

    text: [T] index in [0, R) of each token's text; beyond R for padding.
    nth: [T] number of the text's tokens before it in the step. last: [R] index of each text's last token.
    continues: [R] True for a text that begins with the state of the text before it; None if none does.
    num_alone: of the first tokens, the n-th of which is padding or text n's only one, see `together`; None if a token's
      bits must not depend on how steps cut its text, on any device.
    """

    text: jax.Array
    nth: jax.Array
    last: jax.Array
    continues: jax.Array | None = None
    num_alone: int | None = None

    @property
    def reads(self) -> jax.Array:
        """[T] the text whose state each token reads."""
        if self.continues is None:
            return self.text
        return jnp.where((self.nth == 0) & self.continues[self.text], self.text - 1, self.text)

    @property
    def chunks(self) -> tuple[jax.Array, jax.Array]:
        """[R] the text with which each text's chunk begins, and [T] number of the chunk's tokens before each token."""
        texts = jnp.arange(len(self.last))
        if self.continues is None:
            return texts, self.nth
        begins = jax.lax.cummax(jnp.where(self.continues, 0, texts))
        first = self.last - self.nth[self.last]
        return begins, jnp.arange(len(self.nth)) - first[begins][self.text]
