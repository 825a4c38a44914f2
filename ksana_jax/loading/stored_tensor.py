"""The interface of a tensor in a file, which loading reads in pieces. Knows no file formats, no names of weights."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

CHUNK_BYTES = 8 * 2**20
Apart = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class StoredTensor(abc.ABC):
    """A tensor in a file; dtype is the file format's name for it."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    # Names of the dtypes that can be read.
    dtypes: ClassVar[tuple[str, ...]]

    def chunks(self, rows: slice = slice(None), columns: slice = slice(None)) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields a tensor in pieces of whole rows, about CHUNK_BYTES each, together with their row indices.

        Args:
          rows, columns: the part that is read; row indices count from its first one.

        Each piece is a copy, in float32, float16 or bfloat16.
        """
        if not self.shape:
            yield slice(0, 1), self.read(slice(None), slice(None)).reshape(1)
            return
        begin, end, _ = rows.indices(self.shape[0])
        shape = list(self.shape[1:])
        if columns != slice(None):
            shape[0] = len(range(shape[0])[columns])
        row_bytes = int(np.prod(shape, dtype=np.int64)) * self.value_bytes
        step = max(1, CHUNK_BYTES // max(row_bytes, 1))
        for first in range(begin, end, step):
            stop = min(first + step, end)
            yield slice(first - begin, stop - begin), self.read(slice(first, stop), columns)

    @property
    def form(self) -> str | None:
        """Name in `models.block_matrix.FORMS` of the form in which memory keeps the tensor as stored, or None."""
        return None

    @property
    def block(self) -> int:
        """Columns of a block of a tensor with a `form`."""
        raise NotImplementedError(f"{self.dtype} has no blocks")

    def apart(self, rows: slice, columns: slice) -> Apart:
        """Returns rows of a tensor with a `form`, or whole blocks of their columns.

        Returns:
          Codes, scales and, if any, minima and factors, as in `BlockMatrix`.
        """
        raise NotImplementedError(f"{self.dtype} has no codes in blocks")

    @property
    @abc.abstractmethod
    def value_bytes(self) -> int:
        """Bytes of a value of a piece."""

    @abc.abstractmethod
    def read(self, rows: slice, columns: slice) -> np.ndarray:
        """Reads rows from the file, or columns of them; all of a tensor without dimensions."""
