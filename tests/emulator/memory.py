"""Memory of a GPU: global memory as arrays at addresses, shared memory that knows who may see which bytes.

Shared memory follows PTX's proxies: wgmma and TMA (the async proxy) see bytes that threads write (the generic proxy)
only after the writing thread has executed `fence.proxy.async`. Accesses of two warps, one of them a write, are
ordered by barriers (`order`), or a trap. Bytes that are unwritten, or that a running copy will write, are all
ones: NaN in every floating type, -1 in integers.
"""

from __future__ import annotations

import numpy as np

from tests.emulator.order import Clocks, knows, owner

SHARED_BASE = 1024  # bytes that the system keeps for itself
GLOBAL_BASE = 1 << 40
GRANULE = 16  # bytes; a swizzle moves them as one
_WORD = 4  # bytes; warps may write words of a granule each without waiting for one another
_GUARD = 1 << 20  # between two arrays


class Trap(Exception):
    """A kernel did something that the hardware does not define, or defines otherwise than intended."""


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
    wgmmas and copies under way read it. `written`: for each word the moment of the last write, which is a copy's from
    its issue on; `read`: for each word and warp the moment of its last read.
    """

    def __init__(self, num_bytes: int, clocks: Clocks):
        self.size = SHARED_BASE + num_bytes
        self.data = np.full(-(-self.size // GRANULE) * GRANULE, 0xFF, np.uint8)
        granules, words, self._warps = len(self.data) // GRANULE, GRANULE // _WORD, len(clocks.told)
        self.clocks = clocks
        self.unfenced = np.zeros(granules, np.uint32)
        self.readers = np.zeros(granules, np.int16)
        self.written = np.zeros((granules, words), np.int32)
        self.read = np.zeros((granules, words, self._warps), np.int32)

    def _check(self, addresses: np.ndarray, size: int, what: str) -> None:
        low, high = int(addresses.min()), int(addresses.max()) + size
        if low < SHARED_BASE or high > self.size:
            raise Trap(
                f"{what} of shared memory outside of what the kernel has: bytes {low - SHARED_BASE} to "
                f"{high - SHARED_BASE} of {self.size - SHARED_BASE}"
            )

    def load(self, addresses: np.ndarray, size: int, warp: int) -> np.ndarray:
        """[n, size] bytes at addresses [n], by threads of a warp."""
        if not len(addresses):
            return np.zeros((0, size), np.uint8)
        self._check(addresses, size, "read")
        told, words = self.clocks.told[warp], _words(addresses, size)
        written = self.written.reshape(-1)[words]
        if not knows(told, written):
            raise Trap(f"a thread reads {self._unknown(words, written, told)}")
        self.read.reshape(-1, self._warps)[words, warp] = told[warp]
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
        told, words = self.clocks.told[warp], _words(addresses, size)
        written, read = self.written.reshape(-1)[words], self.read.reshape(-1, self._warps)[words]
        self._check_order("a thread writes", written, read, told, words)
        self.written.reshape(-1)[words] = told[warp]
        self.data[addresses[:, None] + np.arange(size)] = values
        self.unfenced[granules] |= np.uint32(1 << warp)

    def fence(self, warp: int) -> None:
        """fence.proxy.async: bytes written by this warp become visible to wgmma and TMA."""
        self.unfenced &= np.uint32(~(1 << warp) & 0xFFFFFFFF)

    def begin_read(self, granules: np.ndarray, who: str, warp: int) -> None:
        """Begins an async proxy's read; `granules` holds each once, in order. No write is allowed until `end_read`."""
        if granules[-1] >= len(self.unfenced) or granules[0] < SHARED_BASE // GRANULE:
            raise Trap(f"{who} reads outside of the kernel's shared memory")
        if self.unfenced[granules].any():
            raise Trap(
                f"{who} reads {_place(granules * GRANULE, self.unfenced)}, which a thread wrote without a "
                "fence.proxy.async after it"
            )
        told, written = self.clocks.told[warp], self.written[granules]
        if not knows(told, written):
            raise Trap(f"{who} reads {self._unknown(granules, written, told)}")
        self.readers[granules] += 1

    def end_read(self, granules: np.ndarray, warp: int) -> None:
        self.readers[granules] -= 1
        self.read[granules, :, warp] = self.clocks.told[warp, warp]

    def begin_write(self, granules: np.ndarray, who: str, warp: int, moment: int) -> None:
        """Begins an async proxy's write, from a moment of its mbarrier on. Until the bytes arrive they are all ones."""
        if granules[-1] >= len(self.unfenced) or granules[0] < SHARED_BASE // GRANULE:
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
        written, read, told = self.written[granules], self.read[granules], self.clocks.told[warp]
        self._check_order(f"{who} overwrites", written, read, told, granules)
        self.data.reshape(-1, GRANULE)[granules] = 0xFF
        self.written[granules] = moment

    def _check_order(
        self, what: str, written: np.ndarray, read: np.ndarray, told: np.ndarray, where: np.ndarray
    ) -> None:
        """Checks that a warp knows of the last writes and reads of words or granules before it writes them."""
        if not knows(told, written):
            raise Trap(f"{what} {self._unknown(where, written, told)}")
        late = read > told[: self._warps]
        if late.any():
            *index, reader = np.argwhere(late)[0]
            raise Trap(
                f"{what} {_word_of(where, written, tuple(index))}, which warp {reader} has read: no barrier that this "
                "warp has waited for says that it is done"
            )

    def _unknown(self, where: np.ndarray, written: np.ndarray, told: np.ndarray) -> str:
        """The first word whose last write a warp does not know, and its writer."""
        index = next(index for index, moment in np.ndenumerate(written) if told[owner(moment)] < moment)
        column = owner(int(written[index]))
        writer = f"warp {column} has written" if column < self._warps else "a TMA load writes"
        return (
            f"{_word_of(where, written, index)}, which {writer}: no barrier that this warp has waited for says that it "
            "is there"
        )


def _words(addresses: np.ndarray, size: int) -> np.ndarray:
    words = addresses // _WORD
    return words if size <= _WORD else words[:, None] + np.arange(size // _WORD)


def _word_of(where: np.ndarray, written: np.ndarray, index: tuple[int, ...]) -> str:
    """The word of an element of `written`, at words or in granules `where`."""
    in_words = where.shape == written.shape
    byte = where[index] * _WORD if in_words else where[index[0]] * GRANULE + index[1] * _WORD
    return f"shared memory at byte {int(byte) - SHARED_BASE}"


def _place(addresses: np.ndarray, marked: np.ndarray) -> str:
    first = next(int(a) for a in addresses if marked[int(a) // GRANULE])
    return f"shared memory at byte {first - SHARED_BASE}"


def swizzled(addresses: np.ndarray, span: int) -> np.ndarray:
    """Real places of bytes of shared memory at addresses, if rows of `span` bytes (32, 64, 128) are swizzled.

    Bits 4 to 6 of an address, as many as distinguish the 16-byte parts of a row, are XORed with bits 7 to 9. The
    absolute address counts, for TMA and wgmma alike.
    """
    return addresses ^ (((addresses >> 7) & (span // 16 - 1)) << 4)
