"""Writes small GGUF files, sound or spoilt, byte by byte: nothing is shared with the package that reads them."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11}
TYPE_IDS |= {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "BF16": 30, "MXFP4": 39}
_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": 7, "u8": 10, "i8": 11, "f8": 12}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(given: Any) -> bytes:
    """The type and the bytes of a value: int as uint32, a list of them as int32, float as float32,
    other numbers as NumPy scalars or arrays."""
    if isinstance(given, str):
        return struct.pack("<I", 8) + string(given)
    if isinstance(given, list) and given and isinstance(given[0], int):
        given = np.array(given, np.int32)
    if isinstance(given, list):
        return struct.pack("<IIQ", 9, 8, len(given)) + b"".join(map(string, given))
    if type(given) is int:
        given = np.uint32(given)
    elif type(given) is float:
        given = np.float32(given)
    array = np.asarray(given)
    kind = _NUMBERS[array.dtype.str[1:]]
    data = array.astype(array.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<I", kind) + data if array.ndim == 0 else struct.pack("<IIQ", 9, kind, len(array)) + data


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]] = {},
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """The bytes of a file. tensors: type, row-major shape and data by name."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(string(key) + value(given) for key, given in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        data += bytes(-len(data) % alignment)
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += string(name) + struct.pack("<I", len(shape)) + dims
        header += struct.pack("<IQ", TYPE_IDS.get(kind, 0) if isinstance(kind, str) else kind, len(data))
        data += content
    return header + bytes(-len(header) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any] = {}, **options: int) -> Path:
    """Writes a file. tensors: arrays, stored as F32, F16 or BF16 by their dtype; or as for `gguf_bytes`."""
    kinds = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    stored = {
        name: (kinds[t.dtype.name], t.shape, t.tobytes()) if isinstance(t, np.ndarray) else t
        for name, t in tensors.items()
    }
    path.write_bytes(gguf_bytes(metadata, stored, **options))
    return path
