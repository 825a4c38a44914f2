"""Keeps packed weights in files of the user's cache, which later processes map instead of reading and packing again.

Mapped pages are read when they are first used; processes share them, and the system can drop them. Nobody but the user
may be able to write to the files. A note next to each file has its inode, size and times: one that was cut off or
overwritten since is ignored, and written again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ksana_jax.core.compilation_cache import cache_folder
from ksana_jax.core.files import UnsafeFile, replacing
from ksana_jax.core.private_folder import make_private, open_private
from ksana_jax.core.units import byte_size
from ksana_jax.loading.digest import version_of
from ksana_jax.loading.load import ALIGNMENT
from ksana_jax.models.params import Params

logger = logging.getLogger("ksana_jax")
# Beyond these bytes, the files that were not used for longest are removed.
MAX_BYTES = 4 * 2**30


class PackedFile:
    """The file that keeps the packed weights of a model.

    Args:
      shapes: of the packed weights, Params of jax.ShapeDtypeStruct.
      origin: text that determines the numbers, with a digest of all that they are made of.
    """

    def __init__(self, shapes: Params, origin: str):
        self._leaves, self._tree = jax.tree.flatten(shapes)
        digest = hashlib.sha256(f"{origin} {self._tree} {self._leaves}".encode())
        self.path = cache_folder("packed") / digest.hexdigest()[:32]
        self.note = self.path.with_suffix(".note")

    def read(self) -> Params | None:
        """Maps the weights; returns None if there is no file, or an unsafe or damaged one."""
        try:
            make_private(self.path.parent)
            with open(open_private(self.path), "rb") as file, open(open_private(self.note), "rb") as note:
                if note.read() != version_of(os.fstat(file.fileno())).encode():
                    raise UnsafeFile(f"{self.path} has changed since it was written")
                mapped = np.memmap(file, np.uint8, mode="c")  # XLA adopts memory that can be written to
            os.utime(self.note)  # the time of its last use
        except (OSError, ValueError) as error:
            logger.info("packed weights are not mapped: %s", error)
            return None
        at, placed = 0, []
        for leaf in self._leaves:
            placed.append(jax.device_put(mapped[at : at + _bytes_of(leaf)].view(leaf.dtype).reshape(leaf.shape)))
            at += _bytes_of(leaf) + _padding(leaf)
        return jax.tree.unflatten(self._tree, placed)

    def write(self, params: Params) -> None:
        """Writes the weights, if there is room for them. Another process sees all of them or none."""
        try:
            make_private(self.path.parent)
            _make_room(self.path.parent, sum(map(_bytes_of, self._leaves)))
            with replacing(self.path, 0o600) as file:
                for leaf in jax.tree.leaves(params):
                    file.write(np.asarray(leaf).reshape(-1).view(np.uint8).data)
                    file.write(bytes(_padding(leaf)))
                file.flush()
                os.fsync(file.fileno())  # before the note, which vouches for the content after a crash, too
            with replacing(self.note, 0o600) as file:
                file.write(version_of(self.path.stat()).encode())
        except OSError as error:
            logger.info("packed weights are not kept: %s", error)


def _bytes_of(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _padding(leaf: Any) -> int:
    return -_bytes_of(leaf) % ALIGNMENT


def _make_room(folder: Path, num_bytes: int) -> None:
    """Removes files until a new one fits in `MAX_BYTES`.

    Raises:
      OSError: it never will, or it would take half of what is free.
    """
    if num_bytes > min(MAX_BYTES, shutil.disk_usage(folder).free // 2):
        raise OSError(f"{byte_size(num_bytes)} are too much for {folder}")
    files = sorted((path for path in folder.iterdir() if not path.suffix), key=_last_use)
    total = num_bytes + sum(path.stat().st_size for path in files)
    for path in files:
        if total > MAX_BYTES:
            total -= path.stat().st_size
            path.unlink()
            path.with_suffix(".note").unlink(missing_ok=True)


def _last_use(path: Path) -> float:
    return note.stat().st_mtime if (note := path.with_suffix(".note")).exists() else 0.0
