"""Writes models into a folder with the layout of the Hugging Face hub's cache."""

import hashlib
import os
from pathlib import Path

COMMIT, LATER = "a1" * 20, "b2" * 20


def write_snapshot(cache: Path, repo: str, files: dict[str, bytes], commit: str = COMMIT, revision: str = "main"):
    """A snapshot of links to blobs, as huggingface_hub writes it, and the revision that points to it."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for name, content in files.items():
        link = snapshot / name
        blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
        for made in (link, blob):
            made.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    reference = folder / "refs" / revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    reference.write_text(commit)
    return snapshot


def model_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
