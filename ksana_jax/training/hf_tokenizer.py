"""Files by which transformers reads a SentencePiece tokenizer."""

from __future__ import annotations

from pathlib import Path


def tokenizer_files(model: Path, context: int) -> dict[str, bytes]:
    return {}
