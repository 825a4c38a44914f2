"""Formats log-probabilities as OpenAI's two APIs do. Knows tokens and their texts, no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ksana_jax.core.outputs import Logprob
from ksana_jax.serve.server.model import TokenTexts
from ksana_jax.tokenizers import IncrementalDetokenizer, Tokenizer

# Stands for minus infinity, which JSON does not have; vLLM's value.
LEAST = -9999.0

TokenLogprobs = dict[int, Logprob]


def _number(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST)


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """Returns {"content": [{token, logprob, bytes, top_logprobs}, ...]}, one entry per token."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        return {"token": texts.text_of(token), "logprob": _number(logprob), "bytes": list(texts.bytes_of(token))}

    content = []
    for token, found in zip(tokens, logprobs, strict=True):
        best = sorted((t for t in found if found[t].rank <= num_top), key=lambda t: found[t].rank)[:num_top]
        content.append({**entry(token, found[token]), "top_logprobs": [entry(t, found[t]) for t in best]})
    return {"content": content}


class CompletionLogprobs:
    """Writes {"tokens", "token_logprobs", "top_logprobs", "text_offset"} of the tokens of one choice, as they come.

    Args:
      context: ids before the first token that is written.
      offset: characters before it.
    """

    def __init__(
        self,
        texts: TokenTexts,
        tokenizer: Tokenizer | None,
        skip_special_tokens: bool = True,
        context: Sequence[int] = (),
        offset: int = 0,
    ):
        self._texts, self._offset = texts, offset
        self._detokenizer = (
            None if tokenizer is None else IncrementalDetokenizer(tokenizer, skip_special_tokens, context)
        )

    def write(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, list]:
        """Returns the arrays of the next tokens; None stands for a first token, which nothing predicts."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.push((token,)))
        pairs = list(zip(tokens, logprobs, strict=True))
        return {
            "tokens": [self._texts.name_of(token) for token in tokens],
            "token_logprobs": [None if found is None else _number(found[token]) for token, found in pairs],
            "top_logprobs": [None if found is None else self._top(found) for _, found in pairs],
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in sorted(found.items(), key=lambda item: item[1].rank):
            top.setdefault(self._texts.name_of(token), _number(logprob))  # two tokens may have one text
        return top


def prompt_logprobs(texts: TokenTexts, found: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
    """Returns vLLM's prompt_logprobs: for each prompt token {id: {logprob, rank, decoded_token}}."""

    def entries(of: TokenLogprobs) -> dict[str, Any]:
        return {
            str(token): {"logprob": _number(one), "rank": one.rank, "decoded_token": texts.text_of(token)}
            for token, one in of.items()
        }

    return [None if of is None else entries(of) for of in found]
