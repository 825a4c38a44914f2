"""Writes GGUF files, version 3. Knows no models. Source: the specification of GGUF (ggml, docs/gguf.md)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core.files import replacing
from ksana_jax.core.gguf_file import TYPES

ALIGNMENT = 32
_IDS = {kind.name: number for number, kind in TYPES.items()}
_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}
_STRING, _ARRAY = 8, 9


class NewTensor(NamedTuple):
    """A tensor to write.

    kind: a type of `gguf_file.TYPES`.
    shape: row-major.
    pieces: gives its bytes, in order.
    """

    kind: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes]]

    @property
    def num_bytes(self) -> int:
        """Bytes of its blocks."""
        _, size, num_bytes = TYPES[_IDS[self.kind]]
        return math.prod(self.shape) // size * num_bytes


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, NewTensor]) -> None:
    """Writes a file completely or not at all.

    Args:
      metadata: values by key, as `gguf_file.GGUFFile` has them. A float becomes float32, an int uint32 if it fits.
    """
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(_string(key) + _value(value) for key, value in metadata.items())
    at = 0
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        header += _string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        header += struct.pack("<IQ", _IDS[tensor.kind], at)
        at += _aligned(tensor.num_bytes)
    with replacing(path) as file:
        file.write(header.ljust(_aligned(len(header)), b"\0"))
        for name, tensor in tensors.items():
            num_bytes = sum(map(file.write, tensor.pieces()))
            assert num_bytes == tensor.num_bytes, f"{name}: {num_bytes} bytes, its shape gives {tensor.num_bytes}"
            file.write(bytes(_aligned(num_bytes) - num_bytes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, float):
        value = np.float32(value)
    elif type(value) is int:
        value = next(kind(value) for kind in (np.uint32, np.int32, np.uint64, np.int64) if _holds(kind, value))
    array = np.asarray(value)
    kind, data = _NUMBERS[array.dtype.str[1:]], array.astype(array.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<I", kind) + data if not array.ndim else struct.pack("<IIQ", _ARRAY, kind, array.size) + data


def _holds(kind: type[np.integer], value: int) -> bool:
    return np.iinfo(kind).min <= value <= np.iinfo(kind).max
