"""Adapters of a call's packed matrices, as C++ reads them: of each row, only its slot's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ksana_jax.native.shapes import PANEL, WORD_BYTES, check_shape

# Ranks are filled up to a multiple: as many numbers as the widest vector has.
RANK = 16


class Adapter(NamedTuple):
    """The adapters of a matrix [out, in] in S slots: a row's product y becomes (1 + gain) y + B A x, before its bias.

    slots: int32 [...], of x's rows, below S; -1 for rows without. a: [S, in / p, R, p], with p numbers of a word.
    b: [ceil(out / 64), S, R / p, 64, p]. gains: float32 [S, out]. R is a multiple of RANK.
    """

    slots: jax.Array
    a: jax.Array
    b: jax.Array
    gains: jax.Array

    def check(self, rows: tuple[int, ...], shape: tuple[int, int], rank: int, dtype: Any) -> None:
        per_word, (out, width), num_slots = WORD_BYTES // dtype.itemsize, shape, len(self.a)
        reason = f"the matrix is {list(shape)}, x has rows {list(rows)}"
        if rank % RANK or not self.a.dtype == self.b.dtype == dtype:
            raise ValueError(f"adapters have rank {rank}, {self.a.dtype}; must be a multiple of {RANK}, {dtype}")
        check_shape("slots of rows", self.slots.shape, rows, reason)
        check_shape("A", self.a.shape, (num_slots, width // per_word, rank, per_word), reason)
        check_shape("B", self.b.shape, (-(-out // PANEL), num_slots, rank // per_word, PANEL, per_word), reason)
        check_shape("gains", self.gains.shape, (num_slots, out), reason)


def arguments(
    matrices: Sequence[Any], widths: Sequence[int], x: jax.Array
) -> tuple[Sequence[jax.ShapeDtypeStruct], Sequence[jax.Array]]:
    """Returns room for A x of each matrix and row, and the arguments that follow a call's matrices.

    Args:
      matrices: `operators.Weights`; all of a call have an adapter, or none has.
      widths: of the rows that the matrices multiply. x: whose rows they are.

    Raises:
      ValueError: shapes or types do not fit, or only some of the matrices have adapters.
    """
    found = [w.adapter for w in matrices]
    first, given = found[0], [adapter for adapter in found if adapter is not None]
    if first is None or len(given) < len(found):
        raise ValueError("some matrices of a call have adapters, others none")
    rank = first.a.shape[2]
    for w, width, adapter in zip(matrices, widths, given, strict=True):
        adapter.check(x.shape[:-1], (w.num_rows, width), rank, x.dtype)
    low = jax.ShapeDtypeStruct((len(found), first.slots.size, rank), x.dtype)
    return [low], (first.slots, *(array for adapter in given for array in adapter[1:]))
