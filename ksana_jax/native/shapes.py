"""Checks shapes before each custom call, because the C++ code trusts them. Knows no arrays."""

from __future__ import annotations

# In packed weights: rows of a panel, bytes of a word.
PANEL, WORD_BYTES = 64, 4
# Numbers of a row that share a scale where a matrix is in blocks.
BLOCK = 32


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], reason: str) -> None:
    """Checks the shape of an argument.

    Args:
      reason: the cause of the expected shape, such as "x is [2, 64]".

    Raises:
      ValueError: the shape differs.
    """
    if found != wanted:
        raise ValueError(f"{name} is {list(found)}, must be {list(wanted)}: {reason}")
