"""Reads the header of GGUF files: metadata, and where each tensor is. Knows no models, no tokenizers, no jax.

Memory that the header asks for is bounded by the bytes that the file has.
Source: the specification of GGUF 2 and 3 (ggml, docs/gguf.md).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.core.errors import LoadError
from ksana_jax.core.files import open_to_read

SUFFIX = ".gguf"
VERSIONS = (2, 3)
_SPLIT = re.compile(r"(?P<base>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class BlockType(NamedTuple):
    """A tensor type of ggml: `num_bytes` bytes store a block of `num_values` neighbouring values of a row."""

    name: str
    num_values: int
    num_bytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
# Names of types that are not read, for messages.
_OTHERS = dict(zip((9, 15, 16, 17, 18, 19), ("Q8_1", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S")))
_OTHERS |= dict(zip((21, 22, 23, 24, 25, 26, 27, 28), ("IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64")))
_OTHERS |= {29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"}

_LENGTH = struct.Struct("<Q")
_BOOL, _STRING, _ARRAY, _F32 = 7, 8, 9, 6
# NumPy dtypes of the numbers by GGUF's value type.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", _F32: "<f4", _BOOL: "<u1"}
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor in a GGUF file.

    Args:
      type: how blocks of a row are stored.
      shape: row-major; the values of a row, the last dimension, are neighbours in the file.
      offset: of its first byte, from the start of the file.
    """

    path: Path
    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: whole blocks."""
        return self.shape[-1] // self.type.num_values * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """The header of a GGUF file, or of all parts of a split one.

    Args:
      path: the file, or the first part.
      metadata: values by key: int, float, bool, str, a list of str, or a NumPy array of numbers. A single float32 is
        the float with the shortest decimal form: 1e-05 instead of 9.999999747378752e-06.
      tensors: by name, in the file's order.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def gguf_of(path: Path) -> Path | None:
    """Returns the GGUF file that a model's path stands for; None if the path is something else.

    It is a path that ends in .gguf, or the only model in a folder without a config.json: one file, or the parts of one.
    The encoder of images next to it, whose name says mmproj, is no model.

    Raises:
      LoadError: a folder without a config.json has several.
    """
    if not path.is_dir():
        return path if path.suffix == SUFFIX else None
    if (path / "config.json").exists():
        return None
    models: dict[str, Path] = {}
    files = sorted(path.glob(f"*{SUFFIX}"))
    for file in [file for file in files if "mmproj" not in file.name.lower()] or files:
        split = _SPLIT.fullmatch(file.name)
        models.setdefault(f"{split['base']} of {split['count']}" if split else file.name, file)
    if len(models) > 1:
        names = [file.name for file in models.values()]
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        raise LoadError(f"{path} has {len(names)} GGUF models, give one of them: {', '.join(names[:10])}{more}")
    return next(iter(models.values()), None)


def read_gguf(path: Path) -> GGUFFile:
    """Reads the header of a GGUF file. Given any part of a split model, reads all parts.

    Raises:
      LoadError: the file is damaged or has tensors of an unknown type, or parts are missing.
    """
    file = _read_one(path)
    count = file.metadata.get("split.count", 1)
    return file if _is(count, 1) else _joined(path, count)


def _joined(path: Path, count: Any) -> GGUFFile:
    name = _SPLIT.fullmatch(path.name)
    if name is None or not _is(count, int(name["count"])):
        raise LoadError(
            f"{path}: split.count is {count!r:.40}, must be the number of parts in the name, NAME-00001-of-NNNNN.gguf"
        )
    paths = [path.with_name(f"{name['base']}-{i + 1:05}-of-{count:05}{SUFFIX}") for i in range(count)]
    if absent := [part.name for part in paths if not part.exists()]:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise LoadError(f"{path} is one of {count} parts; missing: {', '.join(absent[:5])}{more}")
    parts = [_read_one(part) for part in paths]
    tensors = {name: info for part in parts for name, info in part.tensors.items()}
    if not _is(total := parts[0].metadata.get("split.tensors.count"), len(tensors)):
        raise LoadError(f"{paths[0]}: split.tensors.count is {total!r:.40}, the parts have {len(tensors):,} tensors")
    return GGUFFile(paths[0], parts[0].metadata, tensors)


def _is(value: Any, number: int) -> bool:
    return type(value) is int and value == number  # an array has no truth value


# Headers by path, size and time of change; None outside `parsing_once`.
_parsed: contextvars.ContextVar[dict[Any, GGUFFile] | None] = contextvars.ContextVar("_parsed", default=None)


@contextlib.contextmanager
def parsing_once() -> Iterator[None]:
    """Parses the header of a GGUF file once in the context, unless the file changes. A header with its vocabulary
    takes many MB, so it is not kept longer."""
    token = _parsed.set({})
    try:
        yield
    finally:
        _parsed.reset(token)


def _read_one(path: Path) -> GGUFFile:
    try:
        with open_to_read(path) as file:
            if (parsed := _parsed.get()) is None:
                return _Header(path, file).read()
            found = os.fstat(file.fileno())
            key = path, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
            if key not in parsed:
                parsed[key] = _Header(path, file).read()
            return parsed[key]
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from None


class _Header:
    """Parses one file from its first byte on."""

    def __init__(self, path: Path, file: BufferedReader):
        self.path, self.file = path, file
        self.size = path.stat().st_size
        self.at = 0

    def read(self) -> GGUFFile:
        if (magic := self.file.read(4)) != b"GGUF":
            raise LoadError(f"{self.path} is not a GGUF file: it begins with {magic!r}")
        self.at = 4
        if (version := self.number("<u4")) not in VERSIONS:
            raise LoadError(f"{self.path}: GGUF version is {version}; supported: {', '.join(map(str, VERSIONS))}")
        num_tensors, num_keys = self.number("<u8"), self.number("<u8")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            metadata[key] = self.value(key, self.number("<u4"))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise LoadError(f"{self.path}: general.alignment is {alignment!r:.40}, must be a positive integer")
        infos = [self.tensor() for _ in range(num_tensors)]
        return GGUFFile(self.path, metadata, self.placed(infos, -(-self.at // alignment) * alignment))

    def take(self, num_bytes: int) -> bytes:
        """Returns the next bytes of the file."""
        if self.at + num_bytes > self.size:
            raise LoadError(
                f"{self.path} is truncated or damaged: its header needs {num_bytes:,} bytes at {self.at:,}, "
                f"the file has {self.size:,}"
            )
        self.at += num_bytes
        return self.file.read(num_bytes)

    def number(self, kind: str) -> Any:
        return np.frombuffer(self.take(int(kind[-1])), kind)[0].item()

    def length(self) -> int:
        return _LENGTH.unpack(self.take(8))[0]

    def string(self) -> str:
        try:
            return self.take(self.length()).decode()
        except UnicodeDecodeError as error:
            raise LoadError(f"{self.path}: a string before byte {self.at:,} is not UTF-8: {error.reason}") from None

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _NUMBERS:
            raise LoadError(f"{self.path}: {key!r:.80} has the unknown value type {kind}")
        value = self.number(_NUMBERS[kind])
        if kind == _BOOL:
            return bool(value)
        return float(str(np.float32(value))) if kind == _F32 else value

    def array(self, key: str) -> list[str] | np.ndarray:
        kind, count = self.number("<u4"), self.length()
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            what = "arrays of arrays" if kind == _ARRAY else f"items of the unknown type {kind}"
            raise LoadError(f"{self.path}: {key!r:.80} has {what}; supported: arrays of numbers or strings")
        values = np.frombuffer(self.take(count * int(_NUMBERS[kind][-1])), _NUMBERS[kind])
        return values != 0 if kind == _BOOL else values

    def tensor(self) -> TensorInfo:
        """Reads the description of a tensor; its offset still counts from the start of the data."""
        name = self.string()
        if not 1 <= (num_dims := self.number("<u4")) <= 4:
            raise LoadError(f"{self.path}: tensor {name!r:.80} has {num_dims:,} dimensions; supported: 1 to 4")
        dims = [self.length() for _ in range(num_dims)]
        kind, offset = self.number("<u4"), self.length()
        if kind not in TYPES:
            known = ", ".join(known.name for known in TYPES.values())
            named = _OTHERS.get(kind, f"number {kind}")
            raise LoadError(f"{self.path}: tensor {name!r:.80} has the type {named}; supported: {known}")
        return TensorInfo(self.path, name, TYPES[kind], tuple(reversed(dims)), offset)

    def placed(self, infos: list[TensorInfo], start: int) -> dict[str, TensorInfo]:
        """Checks sizes, and returns the tensors by name, with offsets from the start of the file."""
        for info in infos:
            problem, (width, end) = None, (info.type.num_values, start + info.offset + info.num_bytes)
            if info.shape[-1] % width:
                problem = f"has shape {list(info.shape)}; rows of {info.type.name} are multiples of {width}"
            elif end > self.size:
                problem = f"ends at byte {end:,} of {self.size:,}: the file is truncated or damaged"
            if problem:
                raise LoadError(f"{self.path}: tensor {info.name!r:.80} {problem}")
        return {info.name: dataclasses.replace(info, offset=start + info.offset) for info in infos}
