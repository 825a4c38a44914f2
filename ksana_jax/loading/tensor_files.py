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
from ksana_jax.core.sources.hub import INDEX, MAX_PARTS, SINGLE
from ksana_jax.loading.config_json import read_json
from ksana_jax.loading.hints import folder_hint
from ksana_jax.loading.stored_tensor import StoredTensor

MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 100_000
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
      LoadError: no safetensors file exists, a shard is outside the directory, a file is damaged, or the index names
        tensors that are not in its shards.
    """
    if (directory / SINGLE).exists() or (directory / SINGLE).is_symlink():
        return read_header(_inside(directory, SINGLE, directory / SINGLE))
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
    if len(weight_map) > MAX_TENSORS:
        raise LoadError(f"{index}: weight_map has {len(weight_map):,} tensors; supported: at most {MAX_TENSORS:,}")
    if len(shards := sorted(set(weight_map.values()))) > MAX_PARTS:
        raise LoadError(f"{index}: weight_map has {len(shards):,} files; supported: at most {MAX_PARTS:,}")
    found: dict[str, SafetensorsTensor] = {}
    for shard in shards:
        for name, stored in read_header(_inside(directory, shard, index)).items():
            if name not in weight_map:
                continue  # as in transformers, what the index does not name is not part of the model
            if name in found:
                raise LoadError(f"{index}: {name} is in both {found[name].path.name} and {shard}")
            found[name] = stored
    absent = [
        f"{name} in {shard}"
        for name, shard in weight_map.items()
        if name not in found or found[name].path.name != Path(shard).name
    ]
    if absent:
        raise LoadError(f"{index}: weight_map names tensors that are not in the files: {', '.join(absent)}")
    return found


def write_tensors(file: BinaryIO, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] = {}) -> None:
    """Writes a safetensors file. The library's own function leaves a temporary file behind when the process is killed.

    Args:
      tensors: contiguous arrays of numbers, by name.
    """
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
    for values in ordered.values():
        file.write(values.reshape(-1).view(np.uint8).data)


def _inside(directory: Path, name: str, source: Path) -> Path:
    """Returns the path of a file, which must be in the directory after links are followed.

    The Hugging Face cache links its snapshots to files in the neighbouring folder `blobs`, which is allowed as well.
    """
    root = directory.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    plain = Path(name)
    if plain.is_absolute() or ".." in plain.parts or "\0" in name:
        raise LoadError(f"{source}: shard {name!r:.80} leaves the directory; supported: files in {directory}")
    try:
        target = (directory / plain).resolve()
        is_file = target.is_file()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError up to Python 3.12
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise LoadError(f"{source}: shard {name!r:.80} cannot be read: {reason}") from None
    if not any(target.is_relative_to(place) for place in allowed):
        raise LoadError(f"{source}: shard {name!r:.80} leaves the directory; supported: files in {directory}")
    if not is_file:
        raise LoadError(f"{source}: shard {name!r:.80} is missing or not a file")
    return directory / plain


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is not a sound safetensors file: {error}") from None


def read_header(path: Path) -> dict[str, SafetensorsTensor]:
    """Returns the tensors of one file. The header's size and number of entries are checked before it is parsed.

    Raises:
      LoadError: the file is truncated or malformed, or the header exceeds MAX_HEADER_BYTES or MAX_TENSORS.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise LoadError(f"{path} is not a sound safetensors file: it has {size} bytes, the header alone takes more")
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER_BYTES:
            raise LoadError(f"{path}: header has {length:,} bytes; supported: at most {MAX_HEADER_BYTES:,}")
        if length > size - 8:
            raise LoadError(f"{path} is truncated: its header has {length:,} bytes, the file {size:,}")
        # Every entry opens a brace, whatever its name; the outer object and __metadata__ open two more.
        header = file.read(length)
        entries = header.count(b"{") - 2
    if entries > MAX_TENSORS:
        raise LoadError(f"{path}: header has {entries:,} entries; supported: at most {MAX_TENSORS:,}")
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        found = {n: SafetensorsTensor(path, n, s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
    if any(stored.dtype in UNKNOWN for stored in found.values()):
        entries = json.loads(header)
        for name, stored in found.items():
            if stored.dtype in UNKNOWN:
                found[name] = dataclasses.replace(stored, offset=8 + length + entries[name]["data_offsets"][0])
    return found
