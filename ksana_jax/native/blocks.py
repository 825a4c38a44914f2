"""Shapes of packed matrices whose codes are in blocks of 32 neighbours of a row; see `layer.Weights`."""

from __future__ import annotations

from typing import Any

from ksana_jax.native.shapes import BLOCK, PANEL, check_shape


def shapes_of_blocks(name: str, w: Any, wanted: tuple[int, int], reason: str) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes that words, and scales and minima, of a matrix [out, in] must have.

    Raises:
      NotImplementedError: codes have other than 4 or 8 bits, or scales and minima another type than float16 or float32.
      ValueError: the matrix is not [out, in].
    """
    panels, (_, num_blocks, depth, _) = -(-w.num_rows // PANEL), w.words.shape
    check_shape(name, (w.num_rows, num_blocks * BLOCK), wanted, reason)
    kinds = {x.dtype.name for x in (w.scales, w.sums) if x is not None}
    if depth not in (4, 8) or len(kinds) != 1 or not kinds <= {"float16", "float32"}:
        found = f"{BLOCK // depth} codes in a word, and scales and minima in {' and '.join(sorted(kinds))}"
        raise NotImplementedError(f"{name} has {found}; there are 4 or 8, and either float16 or float32")
    per_block = min(max(w.scales.shape[1] // num_blocks, 1), 2)
    return (panels, num_blocks, depth, PANEL), (panels, num_blocks * per_block, PANEL)
