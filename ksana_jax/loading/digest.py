"""Digest of a model directory's files, which tells models apart without reading all of their weights. No jax."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ksana_jax.files import open_to_read

_SAMPLE_BYTES = 2**20
_WEIGHTS = (".safetensors",)


def digest_of_files(directory: Path, load_format: str = "auto") -> str:
    """Returns 16 hex digits: config and tokenizer in full, weights by size, first and last MiB.

    After further training, the digest differs.

    Args:
      load_format: with "dummy", weights are left out.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".json", ".model", ".jinja", *_WEIGHTS):
            continue
        if path.suffix in _WEIGHTS and load_format == "dummy":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open_to_read(path) as file:
            if path.suffix in _WEIGHTS and size > 2 * _SAMPLE_BYTES:
                digest.update(file.read(_SAMPLE_BYTES))
                file.seek(-_SAMPLE_BYTES, 2)
            digest.update(file.read())
    return digest.hexdigest()[:16]
