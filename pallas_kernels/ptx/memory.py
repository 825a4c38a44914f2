"""Memory of a GPU: global memory as arrays at addresses, shared memory that knows who may see which bytes.

Shared memory follows what PTX says of proxies: what threads write (the generic proxy), wgmma and TMA (the async proxy)
see only after the writing thread has executed `fence.proxy.async`. Bytes that nobody has written, or that a copy under
way is to write, are all ones: NaN in every floating type, -1 in integers.
"""

from __future__ import annotations

import numpy as np

SHARED_BASE = 1024  # bytes that the system keeps for itself
GLOBAL_BASE = 1 << 40
GRANULE = 16  # bytes; what a swizzle moves as one
_GUARD = 1 << 20  # between two arrays


class Trap(Exception):
    """A kernel did what the hardware does not define or define otherwise than was meant."""


class Global:
    """Arrays at addresses."""

    def __init__(self):
        self._arrays: list[tuple[int, np.ndarray, str]] = []
        self._next = GLOBAL_BASE

    def add(self, data: np.ndarray, name: str) -> int:
        """Takes an array over, whose bytes change with it; gives its address."""
        address = self._next
        self._arrays.append((address, data.reshape(-1).view(np.uint8), name))
        self._next += -(-data.nbytes // 4096) * 4096 + _GUARD
        return address

    def _find(self, low: int, high: int, what: str) -> tuple[int, np.ndarray]:
        for base, data, name in self._arrays:
            if base - _GUARD // 2 <= low < base + len(data) + _GUARD // 2:
                if low < base or high > base + len(data):
                    raise Trap(
                        f"{what} of global memory outside of {name}: bytes {low - base} to {high - base} of {len(data)}"
                    )
                return base, data
        raise Trap(f"{what} of global memory at {low:#x}, where nothing is")

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """[n, size] bytes at addresses [n]."""
        if not len(addresses):
            return np.zeros((0, size), np.uint8)
        base, data = self._find(int(addresses.min()), int(addresses.max()) + size, "read")
        return data[(addresses - base)[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        if len(addresses):
            size = values.shape[1]
            base, data = self._find(int(addresses.min()), int(addresses.max()) + size, "write")
            data[(addresses - base)[:, None] + np.arange(size)] = values


class Shared:
    """Shared memory of one block of threads.

    `unfenced`: for each granule the warps, as bits, that have written it and not fenced since. `readers`: how many
    wgmmas and copies under way read it; `arriving`: how many copies under way write it.
    """

    def __init__(self, num_bytes: int):
        self.size = SHARED_BASE + num_bytes
        self.data = np.full(-(-self.size // GRANULE) * GRANULE, 0xFF, np.uint8)
        granules = len(self.data) // GRANULE
        self.unfenced = np.zeros(granules, np.uint32)
        self.readers = np.zeros(granules, np.int16)
        self.arriving = np.zeros(granules, np.int16)

    def _check(self, addresses: np.ndarray, size: int, what: str) -> None:
        low, high = int(addresses.min()), int(addresses.max()) + size
        if low < SHARED_BASE or high > self.size:
            raise Trap(
                f"{what} of shared memory outside of what the kernel has: bytes {low - SHARED_BASE} to "
                f"{high - SHARED_BASE} of {self.size - SHARED_BASE}"
            )

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """[n, size] bytes at addresses [n], by threads."""
        if not len(addresses):
            return np.zeros((0, size), np.uint8)
        self._check(addresses, size, "read")
        if self.arriving[addresses // GRANULE].any():
            raise Trap(f"a thread reads {_place(addresses, self.arriving)}, which a TMA copy under way is writing")
        return self.data[addresses[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray, warp: int) -> None:
        if not len(addresses):
            return
        size = values.shape[1]
        self._check(addresses, size, "write")
        granules = addresses // GRANULE
        if self.readers[granules].any():
            raise Trap(
                f"a thread writes {_place(addresses, self.readers)}, which a wgmma or TMA copy that has not been "
                "waited for is reading"
            )
        if self.arriving[granules].any():
            raise Trap(f"a thread writes {_place(addresses, self.arriving)}, which a TMA copy under way is writing")
        self.data[addresses[:, None] + np.arange(size)] = values
        self.unfenced[granules] |= np.uint32(1 << warp)

    def fence(self, warp: int) -> None:
        """fence.proxy.async: what this warp has written becomes visible to wgmma and TMA."""
        self.unfenced &= np.uint32(~(1 << warp) & 0xFFFFFFFF)

    def begin_read(self, granules: np.ndarray, who: str) -> None:
        """By the async proxy; `granules` holds each once. Until `end_read` nobody may write them."""
        if granules.max() >= len(self.unfenced) or granules.min() < SHARED_BASE // GRANULE:
            raise Trap(f"{who} reads outside of the kernel's shared memory")
        if self.unfenced[granules].any():
            raise Trap(
                f"{who} reads {_place(granules * GRANULE, self.unfenced)}, which a thread wrote without a "
                "fence.proxy.async after it"
            )
        if self.arriving[granules].any():
            raise Trap(
                f"{who} reads {_place(granules * GRANULE, self.arriving)}, which a TMA copy under way is writing"
            )
        self.readers[granules] += 1

    def end_read(self, granules: np.ndarray) -> None:
        self.readers[granules] -= 1

    def begin_write(self, granules: np.ndarray, who: str) -> None:
        """By the async proxy. Until `end_write` the bytes are all ones."""
        if granules.max() >= len(self.unfenced) or granules.min() < SHARED_BASE // GRANULE:
            raise Trap(f"{who} writes outside of the kernel's shared memory")
        if self.readers[granules].any():
            raise Trap(
                f"{who} overwrites {_place(granules * GRANULE, self.readers)}, which a wgmma or TMA copy that has not "
                "been waited for is reading"
            )
        if self.unfenced[granules].any():
            raise Trap(
                f"{who} overwrites {_place(granules * GRANULE, self.unfenced)}, which a thread wrote without a "
                "fence.proxy.async after it"
            )
        if self.arriving[granules].any():
            raise Trap(f"{who} overwrites {_place(granules * GRANULE, self.arriving)}, which another copy is writing")
        self.data.reshape(-1, GRANULE)[granules] = 0xFF
        self.arriving[granules] += 1

    def end_write(self, granules: np.ndarray) -> None:
        self.arriving[granules] -= 1


def _place(addresses: np.ndarray, marked: np.ndarray) -> str:
    first = next(int(a) for a in addresses if marked[int(a) // GRANULE])
    return f"shared memory at byte {first - SHARED_BASE}"


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Where bytes of shared memory at addresses really are, if rows of `span` bytes (32, 64, 128) are swizzled.

    Bits 4 to 6 of an address, as many as tell the 16-byte parts of a row apart, are XORed with bits 7 to 9. It is the
    absolute address that counts, for TMA and wgmma alike.
    """
    return addresses ^ (((addresses >> 7) & (span // 16 - 1)) << 4)
