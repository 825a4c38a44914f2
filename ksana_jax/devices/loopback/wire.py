"""The wire format of protocol buffers, as much as the loopback reads and writes without their schemas."""

from __future__ import annotations

from collections.abc import Iterator


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number at an offset, and the offset after it."""
    value = shift = 0
    while data[at] > 127:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
    return value | data[at] << shift, at + 1


def varint(value: int) -> bytes:
    """Encodes a number."""
    written = bytearray()
    while value > 127:
        written.append(value & 127 | 128)
        value >>= 7
    return bytes([*written, value])


def number_field(field: int, value: int) -> bytes:
    """Encodes a field that is a number."""
    return varint(field << 3) + varint(value)


def bytes_field(field: int, data: bytes) -> bytes:
    """Encodes a field that is a string or a message."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def bytes_fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields numbers and contents of the fields that are strings or messages."""
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = read_varint(data, at)
        elif kind == 2:
            size, at = read_varint(data, at)
            yield tag >> 3, data[at : at + size]
            at += size
        else:
            at += 8 if kind == 1 else 4


def numbers(data: bytes) -> list[int]:
    """Returns the numbers of a packed field."""
    found, at = [], 0
    while at < len(data):
        value, at = read_varint(data, at)
        found.append(value)
    return found
