"""Writes a shared library whose only function, GetPjrtApi, returns a table in this process: ELF for Linux, no compiler.

With it a test takes the route of a vendor's library, `plugin: PATH.so`, to the loopback.
"""

from __future__ import annotations

import platform
import struct

_HEADER_SIZE, _PROGRAM_HEADER_SIZE = 64, 56
_PAGE = 0x1000


def stub_library(table: int) -> bytes:
    """Returns the library's bytes. table: address of a PJRT_Api.

    Raises:
      NotImplementedError: this processor is neither x86-64 nor aarch64.
    """
    number, code = _code(table)
    strings = b"\0GetPjrtApi\0"
    sections: dict[str, tuple[int, bytes]] = {}
    at = _HEADER_SIZE + 2 * _PROGRAM_HEADER_SIZE

    def place(name: str, data: bytes) -> int:
        nonlocal at
        at += -at % 16
        sections[name] = (at, data)
        at += len(data)
        return at - len(data)

    symbol = struct.pack("<IBBHQQ", 1, 0x12, 0, 1, place("code", code), len(code))  # a global function
    tags = {
        5: place("strings", strings),  # DT_STRTAB
        6: place("symbols", bytes(24) + symbol),  # DT_SYMTAB
        4: place("hash", struct.pack("<5I", 1, 2, 1, 0, 0)),  # DT_HASH: one bucket, with symbol 1
        10: len(strings),  # DT_STRSZ
        11: 24,  # DT_SYMENT
        0: 0,
    }
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in tags.items())
    dynamic_at = place("dynamic", dynamic)
    image = bytearray(at)
    image[:_HEADER_SIZE] = struct.pack(
        "<4sBBBB8xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 0),  # 64 bits, little endian
        *(3, number, 1, 0, _HEADER_SIZE, 0, 0),  # a shared object
        *(_HEADER_SIZE, _PROGRAM_HEADER_SIZE, 2, 64, 0, 0),
    )
    load = struct.pack("<IIQQQQQQ", 1, 7, 0, 0, 0, at, at, _PAGE)
    found = struct.pack("<IIQQQQQQ", 2, 6, *(dynamic_at,) * 3, len(dynamic), len(dynamic), 8)
    image[_HEADER_SIZE : _HEADER_SIZE + 2 * _PROGRAM_HEADER_SIZE] = load + found
    for start, data in sections.values():
        image[start : start + len(data)] = data
    return bytes(image)


def _code(value: int) -> tuple[int, bytes]:
    """Returns the number of this machine in ELF, and a function that returns a number."""
    machine = platform.machine()
    if machine == "x86_64":
        return 62, b"\x48\xb8" + struct.pack("<Q", value) + b"\xc3"  # mov rax, value; ret
    if machine == "aarch64":
        parts = [value >> 16 * index & 0xFFFF for index in range(4)]
        moves = [0xD2800000 | parts[0] << 5]  # movz x0, part
        moves += [
            0xF2800000 | index << 21 | part << 5 for index, part in enumerate(parts) if index
        ]  # movk x0, part, lsl
        return 183, struct.pack("<5I", *moves, 0xD65F03C0)  # ret
    raise NotImplementedError(f"a library for {machine}")
