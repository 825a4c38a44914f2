"""Bounds ids by the size of their file, and how much a tokenizer.json can lengthen a text when encoding or decoding.

Five steps that each replace "a" by a hundred "a" turn one letter into 10 GB, in a library that aborts the process when
memory runs out. The bound is therefore computed from the file, before any text is processed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from ksana_jax.tokenizers.files import TokenizerError

# T5's normaliser, which lengthens texts more than any other published one, reaches 36: NFKC turns U+FDFA into 18
# characters, and a regular expression that can match an empty string counts twice.
MAX_GROWTH = 100


def check_ids(source: str, num_ids: int, num_bytes: int) -> None:
    """Checks the number of a vocabulary's ids against the size of its file: callers go through all ids.

    Raises:
      TokenizerError: the file cannot have so many tokens.
    """
    if num_ids > num_bytes:
        raise TokenizerError(f"{source}: a token has id {num_ids - 1:,}, too large for a file of {num_bytes:,} bytes")


def growth(step: Mapping[str, Any] | None, length: float = 1.0) -> float:
    """Returns the maximum length to which a normaliser, pre-tokenizer or decoder can extend a text of some length.

    Steps whose growth is defined by Unicode (NFKC, lower case), not by the file, count as preserving length, because
    repeating them does not compound.
    """
    if step is None:
        return length
    kind = step.get("type")
    for parts in ("normalizers", "pretokenizers", "decoders"):
        for part in step.get(parts, ()) if kind == "Sequence" else ():
            length = growth(part, length)
    if kind == "Replace":
        old, new = step["pattern"], len(step["content"])
        if size := len(old.get("String", "")):
            return length * max(1.0, new / size)
        return length + (length + 1) * new  # a regular expression may match between any two characters
    if kind == "Prepend":
        return length + len(step["prepend"])
    if kind == "ByteLevel":
        return length * 2  # a non-ASCII character is two or more bytes, each may map to a non-ASCII character
    if kind == "Precompiled":
        return length * _longest_replacement(step["precompiled_charsmap"])
    return length


def _longest_replacement(charsmap: str) -> int:
    """Length of the longest replacement in SentencePiece's compiled table: a trie, then NUL-terminated strings."""
    table = base64.b64decode(charsmap)
    trie_bytes = int.from_bytes(table[:4], "little")
    strings = table[4 + trie_bytes :].split(b"\0")
    return max(1, *(len(string.decode(errors="replace")) for string in strings))
