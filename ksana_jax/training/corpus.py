"""The Python standard library as text: which files are trained on and which are held out. Knows no tokens."""

from __future__ import annotations

import hashlib
import sysconfig
from importlib import resources
from pathlib import Path

HELD_OUT_EVERY = 48  # about 2 % of the files


def stdlib_root() -> Path:
    """Directory of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(name: str) -> bool:
    """Whether the file of this relative name ("email/message.py") is never trained on, on any Python version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0


def _is_source(parts: tuple[str, ...]) -> bool:
    """Leaves out what is installed next to the library, and what records how this interpreter was built."""
    if any(part in ("site-packages", "dist-packages", "__pycache__") for part in parts):
        return False
    return not parts[0].startswith(("config-", "_sysconfigdata"))


def source_texts(root: Path | None = None) -> list[tuple[str, str]]:
    """Relative name and text of every UTF-8 *.py file below root (the standard library), sorted by name."""
    root = root or stdlib_root()
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not _is_source(relative.parts) or not path.is_file():
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            found.append((relative.as_posix(), text))
    return sorted(found)


def split_texts(texts: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(training, held out), each without duplicates; a training file with the text of a held-out one is dropped."""
    seen: set[str] = set()
    parts: tuple[list, list] = ([], [])
    for part, held_out in ((1, True), (0, False)):
        for name, text in texts:
            if is_held_out(name) == held_out and text not in seen:
                seen.add(text)
                parts[part].append((name, text))
    return parts


def heldout_names() -> frozenset[str]:
    """Relative names that the embedded model's training held out; empty while there is no embedded model."""
    listed = resources.files("ksana_jax").joinpath("assets/ksana-tiny/heldout.txt")
    return frozenset(listed.read_text(encoding="utf-8").splitlines()) if listed.is_file() else frozenset()


def heldout_texts(min_chars: int = 0, root: Path | None = None) -> list[tuple[str, str]]:
    """Relative name and text of held-out files of at least so many characters, sorted by name.

    They are read from the running interpreter. In another Python version than the one of the training, a file of that
    name has changed text or is missing; and a held-out name that is new there is left out, because its text may have
    been trained on under another name.
    """
    names = heldout_names()
    held_out = split_texts(source_texts(root))[1]
    return [(name, text) for name, text in held_out if len(text) >= min_chars and (not names or name in names)]
