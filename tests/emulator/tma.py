"""Bulk copies between global and shared memory: boxes of tensors (TMA), swizzled, and plain rows of bytes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tests.emulator.memory import GRANULE, Global, Shared, Trap, swizzled


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A tensor map as cuTensorMapEncodeTiled makes it; dimensions from the outermost to the innermost.

    Args:
      address: of the array.
      shape, strides, box: in elements; the innermost stride is 1. element_bytes: of one.
      swizzle: bytes of a row that is swizzled in shared memory: 32, 64, 128; 0 for none.

    Raises:
      Trap: the driver or the hardware would refuse it.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_bytes: int
    swizzle: int = 0

    def __post_init__(self):
        row = self.box[-1] * self.element_bytes
        for wrong, why in (
            (not 1 <= len(self.shape) <= 5, f"{len(self.shape)} dimensions, not 1 to 5"),
            (self.address % 16, f"address {self.address:#x} is no multiple of 16"),
            (self.strides[-1] != 1, f"innermost stride {self.strides[-1]}, not 1"),
            (any(s * self.element_bytes % 16 for s in self.strides[:-1]), f"strides {self.strides} not of 16 bytes"),
            (any(not 0 < n <= 256 for n in self.box), f"box {self.box}, not of 1 to 256"),
            (row % 16, f"rows of {row} bytes in a box, not a multiple of 16"),
            (self.swizzle and row > self.swizzle, f"rows of {row} bytes in a box swizzled by {self.swizzle}"),
        ):
            if wrong:
                raise Trap(f"tensor map: {why}")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.box) * self.element_bytes

    def elements(self, corner: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Elements of a box at a corner: their offsets in the array, in bytes, and which are inside it; flat."""
        offset, inside = np.zeros((), np.int64), np.ones((), bool)
        for size, count, stride, first in zip(self.shape, self.box, self.strides, corner, strict=True):
            index = first + np.arange(count, dtype=np.int64)
            offset = offset[..., None] + index * (stride * self.element_bytes)
            inside = inside[..., None] & ((index >= 0) & (index < size))
        return offset.reshape(-1), inside.reshape(-1)


class TensorCopy:
    """A box on its way between an array and shared memory. All checks are made when it is issued.

    Args:
      who: for messages. corner: of the box in the array. shared: address.
      warp: issues it. moment: for a load to shared memory, of its mbarrier; None for a store.
    """

    def __init__(
        self,
        who: str,
        tensor: TensorMap,
        corner: tuple[int, ...],
        shared: int,
        memory: Shared,
        warp: int,
        moment: int | None,
    ):
        if shared % 128:
            raise Trap(f"{who}: address {shared:#x} in shared memory is no multiple of 128 bytes")
        if len(corner) != len(tensor.shape):
            raise Trap(f"{who}: {len(corner)} coordinates for {len(tensor.shape)} dimensions")
        self.tensor, self.corner, self.memory, self.warp, self.load = tensor, corner, memory, warp, moment is not None
        granules = shared + np.arange(0, tensor.num_bytes, GRANULE)
        self.granules = (swizzled(granules, tensor.swizzle) if tensor.swizzle else granules) // GRANULE
        self.touched = np.sort(self.granules)
        _begin(memory, self.touched, who, warp, moment)

    def run(self, memory: Global) -> int:
        """Moves the bytes and returns their number. The source of a store must stay until `finish`."""
        tensor, size = self.tensor, self.tensor.element_bytes
        offsets, inside = tensor.elements(self.corner)
        addresses = tensor.address + offsets[inside]
        if self.load:  # elements outside of the array are zero
            values = np.zeros((len(offsets), size), np.uint8)
            values[inside] = memory.load(addresses, size)
            self.memory.data.reshape(-1, GRANULE)[self.granules] = values.reshape(-1, GRANULE)
        else:
            values = self.memory.data.reshape(-1, GRANULE)[self.granules]
            memory.store(addresses, values.reshape(-1, size)[inside])
        return tensor.num_bytes

    def finish(self) -> None:
        self.memory.end_read(self.touched, self.warp)


class RowCopy:
    """Consecutive bytes on their way between global and shared memory; as `TensorCopy`."""

    def __init__(
        self, who: str, address: int, shared: int, num_bytes: int, memory: Shared, warp: int, moment: int | None
    ):
        if address % 16 or shared % 16 or num_bytes % 16:
            raise Trap(f"{who}: of {address:#x}, {shared:#x} and {num_bytes} bytes one is no multiple of 16")
        self.address, self.shared, self.num_bytes, self.memory = address, shared, num_bytes, memory
        self.warp, self.load = warp, moment is not None
        self.touched = np.arange(shared // GRANULE, (shared + num_bytes) // GRANULE)
        _begin(memory, self.touched, who, warp, moment)

    def run(self, memory: Global) -> int:
        where = slice(self.shared, self.shared + self.num_bytes)
        if self.load:
            self.memory.data[where] = memory.load(np.array([self.address]), self.num_bytes)[0]
        else:
            memory.store(np.array([self.address]), self.memory.data[where][None])
        return self.num_bytes

    def finish(self) -> None:
        self.memory.end_read(self.touched, self.warp)


def _begin(memory: Shared, granules: np.ndarray, who: str, warp: int, moment: int | None) -> None:
    if moment is None:
        memory.begin_read(granules, who, warp)
    else:
        memory.begin_write(granules, who, warp, moment)
