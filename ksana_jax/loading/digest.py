"""Digest of a model's files, of which every byte counts. No jax."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import time
from io import BufferedReader
from pathlib import Path

from ksana_jax.core.compilation_cache import cache_folder
from ksana_jax.core.files import open_to_read, read_bytes, write_atomic
from ksana_jax.core.gguf_file import gguf_of, read_gguf
from ksana_jax.core.sources.hub import INDEX, SMALL_FILES

_WEIGHTS = (".safetensors",)
# Digests of larger files are kept in the user's cache: hashing a GB takes 0.5 s, without SHA instructions 2.5 s.
_KEPT_BYTES = 2**21
# Within a clock tick a file can change twice with the same times; those of network file systems take up to 2 s.
_TICK_NS = 2 * 10**9


def digest_of_files(model: Path, load_format: str = "auto") -> str:
    """Returns 16 hex digits: of config, tokenizer and weights, all bytes. Files that are not read make no difference.

    Args:
      model: a model's directory or GGUF file.
      load_format: with "dummy", weights are left out.
    """
    near = model.iterdir() if model.is_dir() else model.parent.glob("*.gguf")
    found = [(path.name, path.stat()) for path in sorted(near) if path.is_file()]
    if any(map(_may_change_unseen, (stat for _, stat in found))):
        return _digest.__wrapped__(model, load_format, ())
    return _digest(model, load_format, tuple((name, version_of(stat)) for name, stat in found))


@functools.lru_cache(64)
def _digest(model: Path, load_format: str, versions: tuple[tuple[str, str], ...]) -> str:
    digest = hashlib.sha256()
    for path, header_bytes in _files(model):
        dummy = header_bytes is not None and load_format == "dummy"
        if dummy and not header_bytes:
            continue
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with open_to_read(path) as file:
            digest.update(file.read(header_bytes) if dummy else _content(file))
    return digest.hexdigest()[:16]


def _content(file: BufferedReader) -> bytes:
    """Returns a small file's content; of a large one its SHA-256, computed again once inode, size or times differ."""
    found = os.fstat(file.fileno())
    if found.st_size <= _KEPT_BYTES:
        return file.read()
    version, kept = version_of(found), None
    with contextlib.suppress(OSError):
        kept = cache_folder("digests") / hashlib.sha256(version.encode()).hexdigest()[:32]
        if re.fullmatch(rb"[0-9a-f]{64}", text := read_bytes(kept)):
            return text
    digest = hashlib.file_digest(file, "sha256").hexdigest().encode()
    if kept is not None and not _may_change_unseen(found) and version_of(os.fstat(file.fileno())) == version:
        with contextlib.suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(kept, digest)
    return digest


def _may_change_unseen(found: os.stat_result) -> bool:
    """True of a file that has just changed, and could once more with the same times."""
    return time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) <= _TICK_NS


def version_of(found: os.stat_result) -> str:
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _files(model: Path) -> list[tuple[Path, int | None]]:
    """Returns a model's files, and for those with weights the bytes of the header before them."""
    if (gguf := gguf_of(model)) is not None:
        starts: dict[Path, int] = {}
        for info in read_gguf(gguf).tensors.values():
            starts[info.path] = min(info.offset, starts.get(info.path, info.offset))
        return sorted(starts.items())
    paths = [p for p in sorted(model.iterdir()) if p.name in (*SMALL_FILES, INDEX) or p.suffix in _WEIGHTS]
    return [(path, None if path.name in SMALL_FILES else 0) for path in paths]
