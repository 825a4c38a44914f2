"""A quantised matrix of a checkpoint as one tensor, whose numbers are computed as they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ksana_jax.core.errors import LoadError
from ksana_jax.loading.quantised.formats import METHODS, Format
from ksana_jax.loading.stored_tensor import StoredTensor


@dataclasses.dataclass(frozen=True, eq=False)
class QuantisedTensor(StoredTensor):
    """A matrix [out, in] in a format; `dtype` is the format's method.

    parts: its tensors, of the shapes and dtypes that the format gives, by the last component of their names.
    """

    format: Format
    parts: Mapping[str, StoredTensor]
    dtypes = METHODS

    @property
    def value_bytes(self) -> int:
        return 4

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        rows, columns = (slice(*part.indices(size)) for part, size in zip((rows, columns), self.shape, strict=True))
        values = self.format.codes(self.parts, rows, columns).astype(np.float32)
        scales, zeros = self.format.scales(self.parts, rows), self.format.zeros(self.parts, rows)
        groups = self._groups()[columns]
        with np.errstate(over="ignore", invalid="ignore"):  # loading names the tensor
            if zeros is not None:
                values -= zeros.astype(np.float32)[:, groups]
            values *= scales[:, groups]
        return values

    def _groups(self) -> np.ndarray:
        """Returns the group of each column."""
        num_in, count = self.shape[1], self.format.blocks(self.shape)[1]
        if (stored := self.parts.get(self.format.group_of_column)) is None:
            return np.arange(num_in) // (self.format.columns or num_in)
        groups = stored.read(slice(None), slice(None))
        if groups.min() < 0 or groups.max() >= count:
            found = f"{groups.min()} to {groups.max()}"
            raise LoadError(f"{stored.path}: {stored.name} has groups {found}, must be from 0 to {count - 1}")
        return groups
