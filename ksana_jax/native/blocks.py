"""Shapes of packed matrices [out, in] whose codes are in blocks of 32 neighbours of a row; see `operators.Weights`.

Words are int32 [panels, in / 32, w, 64], with w bits of a code. Scales and minima are float16 or float32
[panels, in / 32, 64], or, one for each 16 numbers, [panels, in / 16, 64]. Both may be int8, with factors in float16
[panels, in / 256, 1, or 2 with minima, 64].
"""

from __future__ import annotations

from typing import Any

from ksana_jax.native.shapes import BLOCK, PANEL, check_shape

# Blocks that share the factors of their scales and minima.
BLOCKS_OF_FACTOR = 8
# Types of scales and minima, and of factors.
SUPPORTED = (({"float16"}, None), ({"float32"}, None), ({"int8"}, "float16"))


def shapes_of_blocks(name: str, w: Any, wanted: tuple[int, int], reason: str) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes that words, and scales and minima, of a matrix [out, in] must have. Checks factors.

    Raises:
      NotImplementedError: codes have other than 4, 5, 6 or 8 bits, or scales, minima and factors other types than
        these.
      ValueError: the matrix is not [out, in], or factors do not fit it.
    """
    panels, (_, num_blocks, bits, _) = -(-w.num_rows // PANEL), w.words.shape
    check_shape(name, (w.num_rows, num_blocks * BLOCK), wanted, reason)
    kinds = {x.dtype.name for x in (w.scales, w.sums) if x is not None}
    factors = None if w.factors is None else w.factors.dtype.name
    if bits not in (4, 5, 6, 8) or (kinds, factors) not in SUPPORTED:
        found = f"codes of {bits} bits, scales and minima in {' and '.join(sorted(kinds))}"
        found += f" with factors in {factors}" if factors else ""
        raise NotImplementedError(
            f"{name} has {found}; there are 4, 5, 6 or 8 bits, and float16, float32, or int8 with factors in float16"
        )
    per_block = min(max(w.scales.shape[1] // num_blocks, 1), 2)
    if w.factors is not None:
        of_factors = (panels, -(-num_blocks // BLOCKS_OF_FACTOR), 1 if w.sums is None else 2, PANEL)
        check_shape(f"factors of {name}", w.factors.shape, of_factors, f"it is {list(wanted)}")
    return (panels, num_blocks, bits, PANEL), (panels, num_blocks * per_block, PANEL)
