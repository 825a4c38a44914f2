"""Finds and reads tensors in the safetensors files of a model directory. Knows no names of weights, no jax.

Pickled weights are never opened. Files are mapped into memory a few MiB at a time: the pages of a mapping count as
memory of the process while it exists, so mapping a whole checkpoint would double the memory that loading takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ksana_jax.core.errors import LoadError
from ksana_jax.core.gguf_file import SUFFIX, gguf_of
from ksana_jax.core.sources.hub import INDEX, SINGLE
from ksana_jax.loading.config_json import read_json
from ksana_jax.loading.hints import folder_hint
from ksana_jax.loading.stored_tensor import StoredTensor

# Dtypes for which safetensors has no NumPy type, with one byte a value.
UNKNOWN = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclasses.dataclass(frozen=True)
class SafetensorsTensor(StoredTensor):
    """A tensor in a safetensors file, which is mapped again for each piece, to release the pages already read.

    offset: of its first byte in the file, for a dtype of `UNKNOWN`.
    """

    offset: int | None = None
    dtypes = ("F32", "BF16", "F16", "F64")

    @property
    def value_bytes(self) -> int:
        return {"F64": 8, "F32": 4}.get(self.dtype, 2)

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        if self.offset is not None:
            return self._of_unknown(self.offset, rows, columns)
        with _opened(self.path) as file:
            found = file.get_slice(self.name) if self.shape else file.get_tensor(self.name)
            if self.shape:
                found = found[rows] if columns == slice(None) else found[rows, columns]
        with np.errstate(over="ignore"):  # values beyond float32 become infinite, which is refused
            return found.astype(np.float32) if self.dtype == "F64" else found

    def _of_unknown(self, offset: int, rows: slice, columns: slice) -> np.ndarray:
        (num_rows, width), kind = self.shape, UNKNOWN[self.dtype]
        first, stop, _ = rows.indices(num_rows)
        try:
            found = np.fromfile(self.path, kind, (stop - first) * width, offset=offset + first * width)
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read: {error.strerror or error}") from None
        if len(found) < (stop - first) * width:
            raise LoadError(f"{self.path}: {self.name} is cut off: the file has become shorter")
        return found.reshape(stop - first, width)[:, columns]


def has_weights(model: Path) -> bool:
    """True if a model's path is a GGUF file, or a directory with weights."""
    return gguf_of(model) is not None or any(model.glob("*.safetensors*"))


def find_tensors(directory: Path) -> dict[str, SafetensorsTensor]:
    """Returns all tensors of a model directory by name, from the headers of their files.

    Raises:
      LoadError: no safetensors file exists, a file is damaged, or the index names tensors that are not in its shards.
    """
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    index = directory / INDEX
    if not index.exists():
        pickled = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(kind))
        if pickled:
            raise LoadError(
                f"{directory} has pickled weights ({', '.join(pickled[:5])}), which can run code when they are read; "
                f"supported: {SINGLE} or {INDEX}"
            )
        others = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
        or_one = f", or the path of {others[0]}" if others else ""
        hint = folder_hint(directory)
        raise LoadError(f"{directory} has no weights; supported: {SINGLE} or {INDEX}{or_one}{hint}")

    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise LoadError(f"{index}: weight_map must be an object of tensor names and file names")
    found: dict[str, SafetensorsTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (directory / shard).is_file():
            raise LoadError(f"{index}: shard {shard!r:.80} is missing or not a file")
        # As in transformers, what the index does not name is not part of the model.
        tensors = read_header(directory / shard).items()
        found |= {name: stored for name, stored in tensors if weight_map.get(name) == shard}
    if absent := [f"{name} in {shard}" for name, shard in weight_map.items() if name not in found]:
        raise LoadError(f"{index}: weight_map names tensors that are not in the files: {', '.join(absent)}")
    return found


def write_header(
    file: BinaryIO, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] = {}
) -> dict[str, np.ndarray]:
    """Writes the header of a safetensors file; returns the arrays in the order in which they follow, without gaps."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))  # each begins at a multiple of its size
    for name, values in ordered.items():
        kind = values.dtype.name.replace("bfloat", "bf").replace("uint", "u").replace("int", "i").replace("float", "f")
        begin, end = end, end + values.nbytes
        entries[name] = {"dtype": kind.upper(), "shape": values.shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header)
    return ordered


def write_tensors(file: BinaryIO, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] = {}) -> None:
    """Writes a safetensors file. The library's own function leaves a temporary file behind when the process is killed.

    Args:
      tensors: contiguous arrays of numbers, by name.
    """
    for values in write_header(file, tensors, metadata).values():
        file.write(values.reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is not a sound safetensors file, or truncated: {error}") from None


def read_header(path: Path) -> dict[str, SafetensorsTensor]:
    """Returns the tensors of one file.

    Raises:
      LoadError: the file is truncated or malformed.
    """
    if not path.is_file():
        raise LoadError(f"{path} is not a file")
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        found = {n: SafetensorsTensor(path, n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    if any(stored.dtype in UNKNOWN for stored in found.values()):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length))
        for name, stored in found.items():
            if stored.dtype in UNKNOWN:
                found[name] = dataclasses.replace(stored, offset=8 + length + entries[name]["data_offsets"][0])
    return found
