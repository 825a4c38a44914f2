"""Shapes of packed matrices whose codes are in blocks of 32 neighbours of a row; see `layer.Weights`."""

from __future__ import annotations

from typing import Any

from ksana_jax.native.shapes import BLOCK, PANEL, check_shape

# Blocks that share the factors of their scales and minima.
BLOCKS_OF_FACTOR = 8
# Types of scales and minima, and of factors.
SUPPORTED = (({"float16"}, None), ({"float32"}, None), ({"int8"}, "float16"))


def shapes_of_blocks(name: str, w: Any, wanted: tuple[int, int], reason: str) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes that words, scales and minima, and factors of a matrix [out, in] must have.

    Raises:
      NotImplementedError: codes have other than 4, 5, 6 or 8 bits, or scales, minima and factors other types than
        `layer.Weights` says.
      ValueError: the matrix is not [out, in].
    """
    panels, (_, num_blocks, bits, _) = -(-w.num_rows // PANEL), w.words.shape
    check_shape(name, (w.num_rows, num_blocks * BLOCK), wanted, reason)
    kinds = {x.dtype.name for x in (w.scales, w.sums) if x is not None}
    of_factors = None if w.factors is None else w.factors.dtype.name
    if bits not in (4, 5, 6, 8) or (kinds, of_factors) not in SUPPORTED:
        found = f"codes of {bits} bits, scales and minima in {' and '.join(sorted(kinds))}"
        found += f" with factors in {of_factors}" if of_factors else ""
        raise NotImplementedError(
            f"{name} has {found}; there are 4, 5, 6 or 8 bits, and float16, float32, or int8 with factors in float16"
        )
    per_block = min(max(w.scales.shape[1] // num_blocks, 1), 2)
    factors = (panels, -(-num_blocks // BLOCKS_OF_FACTOR), 1 if w.sums is None else 2, PANEL)
    return (panels, num_blocks, bits, PANEL), (panels, num_blocks * per_block, PANEL), factors
