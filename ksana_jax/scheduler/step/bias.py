"""Biases that a request adds to the scores of its next token: logit bias, allowed ids, bad words, min_tokens. NumPy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ksana_jax.core.request import SamplingParams

if TYPE_CHECKING:
    from ksana_jax.tokenizers import Tokenizer


def bias_of(
    params: SamplingParams,
    bad_words: Iterable[tuple[int, ...]],
    stop_ids: Sequence[int],
    output: np.ndarray,
    vocab_size: int,
) -> np.ndarray:
    """Returns the bias [V] to add to the scores of the next token; -inf for forbidden tokens.

    Args:
      bad_words: token ids of each way to write `params.bad_words`.
      stop_ids: ids that end the output.
      output: tokens generated so far.
    """
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    for token, value in (params.logit_bias or {}).items():
        bias[token] += value
    for *before, last in bad_words:
        # If "x y" is bad, y must not follow x.
        if len(before) <= len(output) and output[len(output) - len(before) :].tolist() == before:
            bias[last] = -np.inf
    if len(output) < params.min_tokens:
        bias[list(stop_ids)] = -np.inf
    return bias


def bad_word_ids(words: Sequence[str] | None, tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of words as a tokenizer writes them at the start of a text and after a space.

    Raises:
      ValueError: no tokenizer is given, or its vocabulary cannot express a word.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise ValueError("this engine has no tokenizer, which bad_words need; logit_bias takes token ids")
    spellings = (
        tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for word in words for space in ("", " ")
    )
    return tuple(dict.fromkeys(tuple(ids) for ids in spellings if ids))
