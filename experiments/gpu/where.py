"""Locates a wrong result: errors by column, head and row, and the first wrong tile."""

from __future__ import annotations

from typing import Any

import numpy as np

COLUMNS = 32
# Maximum length of each list: records stay readable.
MOST = 64


def where_wrong(out: Any, right: Any, tolerance: float) -> dict[str, Any]:
    """Relative errors of out against right [S, Q, N, H].

    Returns:
      by_columns: of each block of 32 columns of the head dim. by_head: of each query head. by_row: of each query, tile
      after tile. tile: the first with a query beyond the tolerance, or None.
    """
    a, b = (np.asarray(x).astype(np.float64) for x in (out, right))
    off = np.where(np.isfinite(a), np.square(a - b), np.inf)
    size = np.maximum(np.square(b), 1e-60)

    def relative(x: np.ndarray, y: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        return np.sqrt(x.sum(axis=axes) / y.sum(axis=axes))

    def shown(errors: np.ndarray) -> list[float]:
        return [float(f"{e:.3g}") for e in errors.ravel()[:MOST]]

    starts = np.arange(0, a.shape[-1], COLUMNS)
    blocks = [np.add.reduceat(x, starts, axis=-1) for x in (off, size)]
    rows = relative(off, size, (2, 3))
    # A row of padding is zero on both sides; against nothing any error is large, zero is none.
    wrong = np.nonzero((rows > tolerance).any(axis=1))[0]
    return {
        "by_columns": shown(relative(blocks[0], blocks[1], (0, 1, 2))),
        "by_head": shown(relative(off, size, (0, 1, 3))),
        "by_row": shown(rows),
        "tile": int(wrong[0]) if len(wrong) else None,
    }


def dump_tile(path: Any, out: Any, right: Any, tile: int) -> bool:
    """Writes one tile of both as float32 [2, Q, N, H], the wrong one first; the first wrong tile of a run stays."""
    if path.exists():
        return False
    np.save(path, np.stack([np.asarray(x[tile]).astype(np.float32) for x in (out, right)]))
    return True
