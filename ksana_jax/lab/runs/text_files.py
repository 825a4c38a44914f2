"""Reads the texts that a setting names: files, folders, glob patterns and fields of JSON lines. Knows no tokens.

An entry of `texts` is

  notes.txt            a UTF-8 file
  corpus               a folder: all files below it, except hidden ones
  corpus/**/*.txt      a pattern: * and ? and [...] within a name, ** for folders
  data.jsonl#content   the text in that field of every line, a JSON object; the file may be a pattern too
  python-docs          the English documentation that comes with Python: the topics of its help(), in order of name
  essays               texts that `ksana fetch` has stored under that name

Files and folders of such names take precedence. An empty list stands for the held-out files of the embedded model's
corpus. Entries of a YAML file are relative to that file's folder, entries of an override on the command line to the
working directory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ksana_jax.core.config import ConfigError
from ksana_jax.core.sources.catalogue import FETCHABLE, fetched

_MAGIC = frozenset("*?[")
PYTHON_DOCS = "python-docs"
# Entries that name texts rather than files.
NAMES = (PYTHON_DOCS, *(name for name, wanted in FETCHABLE.items() if not wanted.is_model))
# All texts of an entry are held in memory.
MAX_BYTES = 2**30


class MissingInput(FileNotFoundError):
    """An input file of an experiment does not exist. path: as given, without `..` where possible."""

    def __init__(self, path: str, message: str):
        super().__init__(message)
        self.path = os.path.normpath(path)


def candidates(entries: Sequence[str], setting: str = "settings.texts") -> list[tuple[str, str]]:
    """Returns (name, text) for all entries, in their order; files of a folder or pattern are sorted.

    Args:
      setting: name of the setting, for messages.

    Raises:
      MissingInput: an entry names no file.
      ConfigError: a file is not UTF-8 text, a line of JSON has no text in the field, or an entry has more than
        MAX_BYTES.
    """
    return list(_candidates(tuple(entries), setting))


def digest(entries: Sequence[str], setting: str = "settings.texts") -> str:
    """Returns a digest of the names and contents of all candidates."""
    return _digest(tuple(entries), setting)


def content_digest(path: str, setting: str) -> str:
    """Returns a digest of a file's bytes.

    Raises:
      MissingInput: there is no such file.
    """
    if not Path(path).is_file():
        raise MissingInput(path, f"{setting}: {path}: no such file")
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def _digest(entries: tuple[str, ...], setting: str) -> str:
    digest = hashlib.sha256()
    for name, text in _candidates(entries, setting):
        content = text.encode()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


@functools.lru_cache(maxsize=4)
def _candidates(entries: tuple[str, ...], setting: str) -> tuple[tuple[str, str], ...]:
    if not entries:
        from ksana_jax.lab.runs.stdlib_corpus import heldout_texts

        return tuple(heldout_texts())
    return tuple(found for entry in entries for found in _texts(entry, setting))


def _texts(entry: str, setting: str) -> Iterator[tuple[str, str]]:
    if entry in NAMES and not os.path.exists(entry):
        if entry == PYTHON_DOCS:
            yield PYTHON_DOCS, _python_docs()
            return
        if (folder := fetched(entry)) is None:
            raise MissingInput(entry, f"{setting}: {entry} is not here yet: ksana fetch {entry}")
        entry = str(folder)
    pattern, field = _split(entry)
    files = _files(entry, pattern, setting)
    if (size := sum(path.stat().st_size for _, path in files)) > MAX_BYTES:
        raise ConfigError(f"{setting}: {entry} has {size:,} bytes, supported are at most {MAX_BYTES:,}")
    for name, path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{setting}: {path} is not UTF-8 text: {error}") from error
        if "\0" in text:
            raise ConfigError(f"{setting}: {path} is not UTF-8 text: it has NUL characters")
        if field is not None:
            yield from _fields(path, name, text, field, setting)
        elif path.suffix == ".jsonl":
            raise ConfigError(f"{setting}: {path} needs the name of a field: write {entry}#FIELD")
        else:
            yield name, text


def _python_docs() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _split(entry: str) -> tuple[str, str | None]:
    """Splits an entry into its file or pattern, and its field if it has one."""
    path, _, field = entry.rpartition("#")
    return (path, field) if path.endswith(".jsonl") else (entry, None)


def _files(entry: str, pattern: str, setting: str) -> list[tuple[str, Path]]:
    """Returns files with their names: the file's name, or its path below the folder or the pattern's fixed part."""
    path = Path(pattern)
    if path.is_file():
        return [(path.name, path)]
    parts = path.parts
    fixed = next((i for i, part in enumerate(parts) if _MAGIC & set(part)), len(parts))
    root, below = Path(*parts[:fixed]), str(Path(*parts[fixed:])) if fixed < len(parts) else "**/*"
    found = sorted(p for p in root.glob(below) if p.is_file()) if root.is_dir() else []
    named = [(p.relative_to(root).as_posix(), p) for p in found]
    named = [(name, p) for name, p in named if not any(part.startswith(".") for part in name.split("/"))]
    if not named:
        kind = "pattern matches no" if fixed < len(parts) else "folder holds no" if path.is_dir() else "no such"
        raise MissingInput(
            pattern,
            f"{setting}: {entry}: {kind} text file. Entries of a YAML file are relative to its folder, those of "
            "an override to the working directory",
        )
    return named


def _fields(path: Path, name: str, content: str, field: str, setting: str) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[field]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f"{setting}: {path} line {number} is not a JSON object with a field {field!r}: {line[:60]!r}"
            ) from error
        if not isinstance(text, str):
            raise ConfigError(f"{setting}: {path} line {number}: {field!r} is {text!r:.60}, must be text")
        yield f"{name}:{number}", text
