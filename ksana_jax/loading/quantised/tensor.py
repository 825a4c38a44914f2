"""A quantised matrix of a checkpoint as one tensor, whose numbers are computed as they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ksana_jax.core.errors import LoadError
from ksana_jax.loading.quantised.formats import METHODS, Format
from ksana_jax.loading.stored_tensor import Apart, StoredTensor
from ksana_jax.models.block_matrix import FORMS, code_levels, zero_of
from ksana_jax.native.shapes import BLOCK


@dataclasses.dataclass(frozen=True, eq=False)
class OneOfStack(StoredTensor):
    """A tensor of a stack, as it is stored."""

    stack: StoredTensor
    index: int
    dtypes = ()

    @property
    def value_bytes(self) -> int:
        return self.stack.value_bytes

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        return self.stack.read(slice(self.index, self.index + 1), rows)[0, :, columns]


@dataclasses.dataclass(frozen=True, eq=False)
class QuantisedStack(StoredTensor):
    """A stack [E, in, out] of transposed matrices in a format; parts are stacks too, [E, out, ...]."""

    format: Format
    parts: Mapping[str, StoredTensor]
    dtypes = METHODS

    @property
    def value_bytes(self) -> int:
        return 4

    @property
    def matrices(self) -> list[QuantisedTensor]:
        """The matrices [out, in]."""
        count, num_in, num_out = self.shape
        return [
            QuantisedTensor(
                *(self.path, self.name, self.dtype, (num_out, num_in), self.format),
                {name: OneOfStack(s.path, s.name, s.dtype, s.shape[1:], s, i) for name, s in self.parts.items()},
            )
            for i in range(count)
        ]

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        return np.stack([matrix.read(slice(None), columns).T for matrix in self.matrices[rows]])


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

    @property
    def unkept(self) -> str | None:
        """The reason for which memory cannot keep the codes, or None."""
        size = self.format.columns or self.shape[1]
        if self.shape[1] % BLOCK:
            return f"rows of {self.shape[1]:,} numbers, no multiple of {BLOCK}"
        if self.format.has_zeros and self.parts[self.format.scale].dtype == "F32":
            return "zeros with scales in F32, whose products are not exact"
        if not self._shares(BLOCK):
            sorts = self.format.group_of_column in self.parts and size % BLOCK == 0
            return "columns in an order of their own (desc_act)" if sorts else f"groups of {size:,} columns"
        return None

    @property
    def form(self) -> str | None:
        if self.unkept:
            return None
        if self.format.is_float:
            return "fp8" if self._shares(FORMS["fp8"].group) else "fp8_32"
        wide = "" if self.parts[self.format.scale].dtype == "F16" else "_f32"
        return f"int{self.format.bits}{'_zeros' if self.format.has_zeros else wide}"

    @property
    def block(self) -> int:
        return BLOCK if (form := self.form) is None else FORMS[form].group

    def apart(self, rows: slice, columns: slice) -> Apart:
        rows, columns = (slice(*part.indices(size)) for part, size in zip((rows, columns), self.shape, strict=True))
        groups = self._groups()[columns][:: self.block]
        codes = self.format.codes(self.parts, rows, columns)
        codes = codes.reshape(len(codes), -1, BLOCK)
        scales, zeros = self.format.scales(self.parts, rows)[:, groups], self.format.zeros(self.parts, rows)
        is_packed = self.format.bits == 4
        if is_packed:
            codes = code_levels((codes + np.int8(zero_of(4))).view(np.uint8), 4)
        if zeros is None:
            is_half = self.parts[self.format.scale].dtype == "F16" and not self.format.is_float
            return codes, scales.astype(np.float16) if is_half else scales, None, None
        unsigned = zeros[:, groups].astype(np.float32) + (zero_of(4) if is_packed else 0)
        with np.errstate(over="ignore", invalid="ignore"):
            return codes, scales, -unsigned * scales, None

    def _shares(self, count: int) -> bool:
        """True if each `count` neighbours of a row share a scale."""
        groups = self._groups()
        return len(groups) % count == 0 and bool((groups == np.repeat(groups[::count], count)).all())

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
