"""Log-probabilities of texts, from an engine or a file, and the differences of two sides. Knows no operators.

A file is JSON with one list for each text, as any program can write it, for instance with transformers:

    {"token_ids": [[1, 52, 7, 9]], "num_prompt_tokens": [2], "logprobs": [[null, -2.1, -0.3, -1.7]]}

`logprobs[i][t]` is the natural logarithm of the probability of token t given the tokens before it; null for the first.
Tokens from `num_prompt_tokens` on are that side's greedy output.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.files import write_atomic
from ksana_jax.lab.runs.asking import forced, token_scores

if TYPE_CHECKING:
    from ksana_jax import LLM

QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Texts and the log-probabilities of their tokens.

    token_ids: of each text, prompt and greedy continuation. num_prompt_tokens: of each text the length of its prompt.
    logprobs: of each text one number for each token after the first.
    """

    token_ids: list[list[int]]
    num_prompt_tokens: list[int]
    logprobs: list[np.ndarray]

    def prompts(self) -> list[list[int]]:
        return [ids[:n] for ids, n in zip(self.token_ids, self.num_prompt_tokens, strict=True)]

    def write(self, path: Path) -> None:
        """Writes the file that `read` reads."""
        logprobs = [[None, *map(float, of_text)] for of_text in self.logprobs]
        content = {"token_ids": self.token_ids, "num_prompt_tokens": self.num_prompt_tokens, "logprobs": logprobs}
        write_atomic(path, json.dumps(content) + "\n")


def read(path: Path) -> Scores:
    """Reads a file of this module's format.

    Raises:
      ConfigError: the format is wrong; the message says where.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids, counts, logprobs = (content[name] for name in ("token_ids", "num_prompt_tokens", "logprobs"))
        found = Scores(
            [[int(t) for t in text] for text in ids],
            [int(n) for n in counts],
            [np.array(text[1:], np.float64) for text in logprobs],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of log-probabilities: {type(error).__name__}: {error}") from error
    lengths = [len(found.token_ids), len(found.num_prompt_tokens), len(found.logprobs)]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ConfigError(f"{path} has {lengths[0]} sequences, {lengths[1]} lengths of prompts, {lengths[2]} logprobs")
    for number, (text, count, scores) in enumerate(
        zip(found.token_ids, found.num_prompt_tokens, found.logprobs, strict=True)
    ):
        if not (1 <= count <= len(text) and len(scores) == len(text) - 1 and np.isfinite(scores).all()):
            raise ConfigError(
                f"{path}: sequence {number} has {len(text)} tokens, {count} of a prompt, {len(scores) + 1} logprobs; "
                "they must be as many as tokens, and finite after the first"
            )
    return found


def of_engine(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> Scores:
    """Returns prompts with num_tokens tokens that an engine generates after each, and its log-probabilities of both."""
    whole = generated(llm, prompts, [num_tokens] * len(prompts))
    return Scores(whole, [len(prompt) for prompt in prompts], scored(llm, whole))


def generated(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> list[list[int]]:
    """Returns prompts with their greedy continuations of some numbers of tokens."""
    greedy = [forced(n, temperature=0) for n in num_tokens if n]
    asked = [{"prompt_token_ids": list(p)} for p, n in zip(prompts, num_tokens, strict=True) if n]
    made = iter(llm.generate(asked, greedy) if asked else ())
    found = []
    for prompt, count in zip(prompts, num_tokens, strict=True):
        found.append([*prompt, *(next(made).check().outputs[0].token_ids if count else ())])
    return found


def scored(llm: LLM, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Returns the log-probabilities of all tokens of texts but their first, computed as for prompts."""
    found = token_scores(llm, [{"prompt_token_ids": list(text)} for text in texts])
    return [np.array([score.logprob for score in scores]) for scores in found]


def first_other_tokens(a: Scores, b: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns, for each text whose tokens differ, the index of the first generated token that does."""
    found = {}
    for text, (left, right) in enumerate(zip(a.token_ids, b, strict=True)):
        at = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), None)
        if at is not None:
            found[text] = at - a.num_prompt_tokens[text]
    return found


def differences(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> dict[str, Any]:
    """Describes how the log-probabilities of the same texts differ.

    Returns:
      count: of tokens. identical: how many have the same bits. quantiles: of the absolute differences, by
      `QUANTILES`. mean: of b - a. first: (text, token, a, b) of the first that differs, in the text where that is
      earliest; None if there is none.
    """
    all_a, all_b = np.concatenate(list(a)), np.concatenate(list(b))
    apart = np.abs(all_b - all_a)
    places = [
        (int(np.flatnonzero(x != y)[0]), text)
        for text, (x, y) in enumerate(zip(a, b, strict=True))
        if not np.array_equal(x, y)
    ]
    first = None
    if places:
        at, text = min(places)
        first = {"text": text, "token": at + 1, "a": float(a[text][at]), "b": float(b[text][at])}
    return {
        "count": len(apart),
        "identical": int(np.sum(all_a == all_b)),
        "quantiles": {f"{q:g}": float(x) for q, x in zip(QUANTILES, np.quantile(apart, QUANTILES), strict=True)},
        "mean": float(np.mean(all_b - all_a)),
        "first": first,
    }
