"""The Python standard library as text, split into training and held-out files. Knows no tokens."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable
from importlib import resources
from pathlib import Path

HELD_OUT_EVERY = 48  # about 2 % of the files


def stdlib_root() -> Path:
    """Returns the directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(name: str) -> bool:
    """True if the file with this relative name ("email/message.py") is held out; the same on all Python versions."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0


# Installed packages, and records of the interpreter's build.
_NOT_SOURCE = ("site-packages", "dist-packages", "__pycache__")
_NOT_SOURCE_AT_THE_TOP = ("config-", "_sysconfigdata")


def source_texts(root: Path | None = None, wanted: Callable[[str], bool] | None = None) -> list[tuple[str, str]]:
    """Returns (relative name, text) of every UTF-8 *.py file below root (the standard library), sorted by name.

    Args:
      wanted: which relative names to read; all if it is not given.
    """
    root = root or stdlib_root()
    found = []
    for folder, folders, files in os.walk(root):
        relative = Path(folder).relative_to(root)
        top = _NOT_SOURCE_AT_THE_TOP if Path(folder) == root else ()
        # Packages may be a hundred times as many files as the library has.
        folders[:] = [name for name in folders if name not in _NOT_SOURCE and not name.startswith(top)]
        for file in files:
            path, name = Path(folder, file), (relative / file).as_posix()
            if not file.endswith(".py") or file.startswith(top) or (wanted is not None and not wanted(name)):
                continue
            if not path.is_file():
                continue
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                continue
            if text:
                found.append((name, text))
    return sorted(found)


def split_texts(texts: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Splits texts into (training, held out) without duplicates; training files equal to a held-out one are dropped."""
    seen: set[str] = set()
    parts: tuple[list, list] = ([], [])
    for part, held_out in ((1, True), (0, False)):
        for name, text in texts:
            if is_held_out(name) == held_out and text not in seen:
                seen.add(text)
                parts[part].append((name, text))
    return parts


def heldout_names() -> frozenset[str]:
    """Returns the relative names that the embedded model's training held out; empty if there is no embedded model."""
    listed = resources.files("ksana_jax").joinpath("assets/ksana-tiny/heldout.txt")
    return frozenset(listed.read_text(encoding="utf-8").splitlines()) if listed.is_file() else frozenset()


def heldout_texts(min_chars: int = 0, root: Path | None = None) -> list[tuple[str, str]]:
    """Returns (relative name, text) of held-out files of at least min_chars characters, sorted by name.

    Files come from the running interpreter. In a Python version other than the training's, they may have another
    text or be missing. Held-out names that are new in it are omitted, because their text may have been trained on under
    another name.
    """
    names = heldout_names()
    held_out = split_texts(source_texts(root, is_held_out))[1]
    return [(name, text) for name, text in held_out if len(text) >= min_chars and (not names or name in names)]
