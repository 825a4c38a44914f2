"""Which texts are scored, as token ids: the held-out files of the embedded model's corpus, or files of the user's."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.config import ConfigError


def candidates(files: Sequence[str]) -> list[tuple[str, str]]:
    """(name, text) of each file, or of the held-out corpus when none is named.

    Raises:
      FileNotFoundError: a file is missing.
      ConfigError: a file is not UTF-8 text.
    """
    return list(_candidates(tuple(files)))


@functools.lru_cache(maxsize=4)
def _candidates(files: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    if not files:
        from ksana_jax.training.corpus import heldout_texts

        return tuple(heldout_texts())
    texts = []
    for name in files:
        if not Path(name).is_file():
            raise FileNotFoundError(f"{name}: no such text file")
        try:
            texts.append((Path(name).name, Path(name).read_text(encoding="utf-8")))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name} is not UTF-8 text: {error}") from error
    return tuple(texts)


@functools.lru_cache(maxsize=4)
def _digest(files: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name, text in _candidates(files):
        content = text.encode()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def digest(files: Sequence[str]) -> str:
    """Of the names and contents of all candidates."""
    return _digest(tuple(files))


def choose(
    files: Sequence[str], tokenizer: Any, num_texts: int, num_tokens: int, seed: int
) -> list[tuple[str, list[int]]]:
    """Draws texts that are long enough and cuts them to length.

    Returns:
      (name, token ids) of num_texts texts, the ids exactly num_tokens long with BOS at position 0.

    Raises:
      ConfigError: too few texts are long enough, with the numbers.
    """
    texts = candidates(files)
    order = np.random.default_rng(seed).permutation(len(texts))
    chosen, longest = [], 0
    for index in order:
        name, text = texts[index]
        ids = encode(tokenizer, text)
        longest = max(longest, len(ids))
        if len(ids) >= num_tokens:
            chosen.append((name, ids[:num_tokens]))
        if len(chosen) == num_texts:
            return chosen
    raise ConfigError(
        f"{len(chosen)} of {len(texts)} texts have {num_tokens:,} tokens or more, {num_texts} are asked for; "
        f"the longest has {longest:,}"
    )


def pieces(files: Sequence[str], tokenizer: Any, num_pieces: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Cuts texts, in the order that the seed draws, one after another into prompts.

    Returns:
      num_pieces lists of exactly num_tokens token ids, each starting with BOS.

    Raises:
      ConfigError: the texts give fewer, with the numbers.
    """
    texts = candidates(files)
    found: list[list[int]] = []
    for index in np.random.default_rng(seed).permutation(len(texts)):
        ids = encode(tokenizer, texts[index][1])
        head, body = (ids[:1], ids[1:]) if tokenizer.bos_id is not None else ([], ids)
        size = num_tokens - len(head)
        cut = [body[i : i + size] for i in range(0, len(body) - size + 1, max(size, 1))]
        found += [head + piece for piece in cut if len(piece) == size]
        if len(found) >= num_pieces:
            return found[:num_pieces]
    raise ConfigError(f"the texts give {len(found)} prompts of {num_tokens:,} tokens, {num_pieces} are asked for")


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that begin with BOS and end as the text does; without BOS if the tokenizer has none."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    return ids if tokenizer.bos_id is None else [tokenizer.bos_id, *ids]
