"""Cuts excerpts and prompts of exact length from texts. Knows tokens, not where texts come from."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ksana_jax.config import ConfigError
from ksana_jax.experiments.models import tokenizer_of
from ksana_jax.experiments.text_files import candidates


@dataclasses.dataclass(frozen=True)
class Excerpt:
    """A part of a text. name: the text's name, with the offset unless it is the beginning. ids: its token ids."""

    name: str
    ids: list[int]

    @property
    def digest(self) -> str:
        """Digest of the tokens, equal for equal excerpts regardless of the names of their texts."""
        return hashlib.sha256(np.array(self.ids, "<i8").tobytes()).hexdigest()[:12]


def draw_excerpts(files: Sequence[str], tokenizer: Any, num_texts: int, num_tokens: int, seed: int) -> list[Excerpt]:
    """Draws excerpts, each of exactly num_tokens tokens with BOS at position 0.

    All disjoint excerpts of the texts form one shuffled list: first the beginning of every text, then a random later
    place in each, and so on. Seed s takes the s-th num_texts of them, starting over at the end of the list, so seeds
    0, 1, 2, ... share nothing until the list is exhausted.

    Raises:
      ConfigError: the texts have fewer than num_texts excerpts; gives the numbers.
    """
    texts = candidates(files)
    order = np.random.default_rng(0).permutation(len(texts)).tolist()
    beginnings: list[Excerpt] = []
    for index in order:
        if places := _places(index, texts, tokenizer, num_tokens):
            beginnings.append(_excerpt(texts[index], tokenizer, places[0], num_tokens))
        if len(beginnings) == (seed + 1) * num_texts:
            return beginnings[-num_texts:]
    check_number(files, tokenizer, num_texts, num_tokens, "settings.num_texts")
    found = [(index, _places(index, texts, tokenizer, num_tokens)) for index in order]
    rounds = range(max(len(places) for _, places in found))
    listed = [(index, places[r]) for r in rounds for index, places in found if r < len(places)]
    start = seed % (len(listed) // num_texts) * num_texts
    return [_excerpt(texts[i], tokenizer, place, num_tokens) for i, place in listed[start : start + num_texts]]


def check_number(files: Sequence[str], tokenizer: Any, number: int, num_tokens: int, setting: str) -> None:
    """Checks that the texts have as many disjoint excerpts as a setting requires.

    Raises:
      ConfigError: they have fewer; gives the setting, the available tokens, and the excerpts that they allow.
    """
    texts, held, sizes = candidates(files), 0, []
    for _, text in texts:
        body = _body(tokenizer, text)
        sizes.append(len(body))
        held += len(body) // _room(tokenizer, num_tokens)
        if held >= number:
            return
    raise ConfigError(
        f"{setting} is {number}, but the texts have {held} excerpts of {num_tokens:,} tokens: "
        f"{sum(sizes):,} tokens in total, the longest {max(sizes, default=0):,}; files: {len(texts)}"
    )


def check_model(model: str, files: Sequence[str], number: int, num_tokens: int, setting: str) -> None:
    """Does `check_number` before the model is loaded; accepts a model without a tokenizer."""
    if (tokenizer := tokenizer_of(model)) is not None:
        check_number(files, tokenizer, number, num_tokens, setting)


def _bos(tokenizer: Any) -> list[int]:
    """Returns the ids with which an excerpt begins: BOS, if the tokenizer has one."""
    if tokenizer is None:
        raise ConfigError("texts need a tokenizer, which the model does not have")
    return [] if tokenizer.bos_id is None else [tokenizer.bos_id]


def _room(tokenizer: Any, num_tokens: int) -> int:
    """Returns the number of text tokens in an excerpt, BOS excluded; at least 1."""
    return max(num_tokens - len(_bos(tokenizer)), 1)


def _places(index: int, texts: Sequence[tuple[str, str]], tokenizer: Any, num_tokens: int) -> list[int]:
    """Returns the token offsets of a text's disjoint excerpts: 0, then random places in random order."""
    size, length = _room(tokenizer, num_tokens), len(_body(tokenizer, texts[index][1]))
    count = length // size
    if count < 2:
        return [0] * count
    rng = np.random.default_rng([1, index])
    gaps = np.sort(rng.integers(0, length - count * size + 1, count - 1))
    return [0, *rng.permutation(np.arange(1, count) * size + gaps).tolist()]


def _excerpt(text: tuple[str, str], tokenizer: Any, place: int, num_tokens: int) -> Excerpt:
    body = _body(tokenizer, text[1])[place : place + _room(tokenizer, num_tokens)].tolist()
    return Excerpt(f"{text[0]} from token {place:,}" if place else text[0], _bos(tokenizer) + body)


@functools.lru_cache(maxsize=256)
def _body(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)


def cut_prompts(files: Sequence[str], tokenizer: Any, num_prompts: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Cuts texts into prompts, one after another, in an order drawn by the seed.

    Returns:
      num_prompts lists of exactly num_tokens token ids, each starting with BOS.

    Raises:
      ConfigError: the texts are too short; gives the numbers.
    """
    texts, head = candidates(files), _bos(tokenizer)
    size, step = num_tokens - len(head), _room(tokenizer, num_tokens)
    found: list[list[int]] = []
    for index in np.random.default_rng(seed).permutation(len(texts)):
        body = _body(tokenizer, texts[index][1]).tolist()
        found += [head + body[i : i + size] for i in range(0, len(body) - step + 1, step)]
        if len(found) >= num_prompts:
            return found[:num_prompts]
    check_number(files, tokenizer, num_prompts, num_tokens, "the number of prompts")
    raise AssertionError("what is counted can be cut")
