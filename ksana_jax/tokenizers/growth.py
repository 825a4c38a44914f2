"""How long a text can become on its way into tokens and back: the steps of a tokenizer.json that lengthen it.

Five replacements of "a" by a hundred of them make 10 GB of one letter, inside a library that ends the process when
memory does. So the bound is computed from the file, before any text is given to it. Knows JSON only.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

# T5's normaliser, the longest-winded of the published ones, reaches 36: NFKC makes 18 characters of U+FDFA, and a
# regular expression that may match nothing counts twice.
MAX_GROWTH = 100


def growth(step: Mapping[str, Any] | None, length: float = 1.0) -> float:
    """The most characters that text of some length can become in a normaliser, pre-tokenizer or decoder.

    Steps whose growth is Unicode's and not the file's (NFKC, lower case) count as one character for one: they do not
    add up, however often they are repeated.
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
        return length * 2  # a character beyond ASCII is two or more bytes, each of which may be such a character again
    if kind == "Precompiled":
        return length * _longest_replacement(step["precompiled_charsmap"])
    return length


def _longest_replacement(charsmap: str) -> int:
    """Characters of the longest replacement in SentencePiece's compiled table: a trie, then strings that end in NUL."""
    table = base64.b64decode(charsmap)
    trie_bytes = int.from_bytes(table[:4], "little")
    strings = table[4 + trie_bytes :].split(b"\0")
    return max(1, *(len(string.decode(errors="replace")) for string in strings))
