"""Packed weights with adapters: calls into C++ compute both, and read only the slots of a step's rows."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import numpy as np

from ksana_jax.models.adapted import Adapted
from ksana_jax.models.block_matrix import PackedBlocks
from ksana_jax.native.adapters import RANK, Adapter
from ksana_jax.native.operators import Weights, project
from ksana_jax.native.shapes import PANEL, WORD_BYTES
from ksana_jax.ops.native_operators import PackedMatrix


@flax.struct.dataclass
class PackedAdapted(Adapted):
    """An `Adapted` whose base is a `PackedMatrix` or `PackedBlocks`, which never is several matrices of one input.

    a, b: see `Adapter`; their rank is filled up to a multiple of RANK.
    """

    @staticmethod
    def in_slot(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (rank, width), (rows, _), per_word = a.shape, b.shape, WORD_BYTES // a.dtype.itemsize
        more, panels = -rank % RANK, -(-rows // PANEL)
        a, b = np.pad(a, ((0, more), (0, 0))), np.pad(b, ((0, panels * PANEL - rows), (0, more)))
        words = b.reshape(panels, PANEL, -1, per_word).transpose(0, 2, 1, 3)
        return a.reshape(-1, width // per_word, per_word).transpose(1, 0, 2), words

    @property
    def adapter(self) -> Adapter | None:
        return None if self.slots is None else Adapter(self.slots, self.a[0], self.b[0], self.gains[0])

    def multiply(self, x: jax.Array, b: jax.Array | None = None, *, dtype=None) -> jax.Array:
        return project(x, [Weights.of(self, b)], dtype=dtype)[0]


def adapted_form(base: Any) -> type[Adapted]:
    """Returns the form of a matrix with adapters."""
    return PackedAdapted if isinstance(base, PackedMatrix | PackedBlocks) else Adapted
