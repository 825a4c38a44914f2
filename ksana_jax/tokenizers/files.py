"""Reads the small files of a tokenizer's directory, with limits. Knows no tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Several times the largest published tokenizer.json (about 35 MB); larger files are not read.
MAX_FILE_BYTES = 64 * 2**20


class TokenizerError(ValueError):
    """A tokenizer's files cannot be used; one line names the file and the problem."""


def one_line(error: object, limit: int = 300) -> str:
    """Returns an error's message on one line of at most `limit` characters."""
    text = " ".join(str(error).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_bytes(path: Path) -> bytes:
    """Reads a tokenizer's file completely.

    Raises:
      TokenizerError: the file cannot be read, is empty or has more than MAX_FILE_BYTES.
    """
    try:
        if not path.is_file():
            raise TokenizerError(f"{path} is missing or not a file")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise TokenizerError(f"{path} has {size:,} bytes; supported: at most {MAX_FILE_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {one_line(error)}") from None
    if not data:
        raise TokenizerError(f"{path} is empty")
    return data


def read_text(path: Path) -> str:
    """Reads a tokenizer's file as UTF-8.

    Raises:
      TokenizerError: as `read_bytes`, or the file is not UTF-8.
    """
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {one_line(error)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      TokenizerError: as `read_bytes`, or the file does not contain a JSON object.
    """
    try:
        values = json.loads(read_text(path))
    except TokenizerError:
        raise
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise TokenizerError(f"{path} holds {type(values).__name__}, must be a JSON object")
    return values


def read_optional_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one if there is no such file."""
    return read_object(path) if path.exists() else {}
