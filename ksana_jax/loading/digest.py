"""Digest of a model's files, which distinguishes models without reading all of their weights. No jax."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ksana_jax.core.files import open_to_read
from ksana_jax.core.gguf_file import gguf_of, read_gguf
from ksana_jax.core.sources.hub import INDEX, SMALL_FILES

_SAMPLE_BYTES = 2**20
_WEIGHTS = (".safetensors",)


def digest_of_files(model: Path, load_format: str = "auto") -> str:
    """Returns 16 hex digits: config and tokenizer in full, weights by size, first and last MiB.

    After further training, the digest differs. Files that are not read make no difference.

    Args:
      model: a model's directory or GGUF file.
      load_format: with "dummy", weights are left out.
    """
    digest = hashlib.sha256()
    for path, header_bytes in _files(model):
        weights, size = header_bytes is not None, path.stat().st_size
        if weights and load_format == "dummy" and not header_bytes:
            continue
        digest.update(f"{path.name} {size} ".encode())
        with open_to_read(path) as file:
            digest.update(file.read(header_bytes or 0))
            if weights and load_format == "dummy":
                continue
            if weights and size - file.tell() > 2 * _SAMPLE_BYTES:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(-_SAMPLE_BYTES, 2)
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _files(model: Path) -> list[tuple[Path, int | None]]:
    """Returns a model's files, and for those with weights the bytes before them that are read in full."""
    if (gguf := gguf_of(model)) is not None:
        starts: dict[Path, int] = {}
        for info in read_gguf(gguf).tensors.values():
            starts[info.path] = min(info.offset, starts.get(info.path, info.offset))
        return sorted(starts.items())
    paths = [p for p in sorted(model.iterdir()) if p.name in (*SMALL_FILES, INDEX) or p.suffix in _WEIGHTS]
    return [(path, None if path.name in SMALL_FILES else 0) for path in paths]
