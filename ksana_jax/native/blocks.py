"""Packed matrices [out, in] whose codes are in blocks of 32 neighbours of a row: their arrays, as C++ reads them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ksana_jax.native.shapes import BLOCK, PANEL
from ksana_jax.native.target import STORED

# Numbers of a row that share the factors of their scales and minima.
SUPERBLOCK = 256


class Form(NamedTuple):
    """Storage of numbers in memory by type: as code * scale + minimum, or, without minima, code * scale.

    Files store Q2_K and Q3_K, and levels of a table, in fewer bits.

    bits: of a code. Codes of 4, 5 and 6 bits start at 0; without minima, 2 ** (bits - 1) is subtracted. 8-bit codes
      have a sign, and are floats with is_float.
    group: numbers that share a scale: 16 or 32, and 128 of floats.
    scales: dtype of scales and minima. Those in int8 are multiplied by factors in float16, of each 256 numbers; float32
      holds the products exactly.
    """

    bits: int
    has_minima: bool = False
    group: int = BLOCK
    scales: str = "float16"
    is_float: bool = False

    @property
    def codes(self) -> Any:
        """NumPy's type of the codes."""
        return jnp.float8_e4m3fn if self.is_float else jnp.uint8 if self.bits < 8 else jnp.int8

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of a block of 32."""
        return BLOCK * self.bits // 8

    @property
    def has_factors(self) -> bool:
        return self.scales == "int8"

    def of_row(self, width: int) -> list[tuple[np.dtype, tuple[int, ...]]]:
        """Returns the arrays of a row of `width` numbers in a panel: words, scales, and any minima and factors."""
        scales = (np.dtype(self.scales), (width // self.group,))
        found = [(np.dtype(np.int32), (width // BLOCK, self.bits)), *[scales] * (1 + self.has_minima)]
        factors = (np.dtype(np.float16), (width // SUPERBLOCK, 1 + self.has_minima))
        return found + [factors] * self.has_factors

    def panel_bytes(self, width: int) -> int:
        """Bytes of the 64 rows of a panel."""
        return PANEL * sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.of_row(width))

    def check(self, name: str) -> None:
        """Raises NotImplementedError if C++ does not multiply packed codes of this form."""
        if self.bits not in (4, 5, 6, 8) or self.group not in (16, BLOCK) or self.is_float:
            given = f"{self.bits} bits in groups of {self.group}{', floats' * self.is_float}"
            raise NotImplementedError(
                f"{name} has codes of {given}; packed ones are integers of 4, 5, 6 or 8 bits in groups of 16 or {BLOCK}"
            )

    @property
    def attribute(self) -> list[int]:
        """Numbers from which C++ makes a `Blocks` of blocks.h."""
        return [self.bits, self.group == 16, self.has_minima, STORED[self.scales]]
