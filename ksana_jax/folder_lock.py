"""Keeps two processes from using one folder at the same time, by a lock on a file in it."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from ksana_jax.files import UnsafeFile, open_to_update


class FolderInUse(Exception):
    """The folder is locked: by the process of this number, as far as that is known."""


class FolderLock:
    """Holds a lock file until it is released, or the process ends in whatever way.

    Args:
      path: of the lock file; made where it does not exist, and never removed.
      shared: let others that share it hold it as well.

    Raises:
      FolderInUse: somebody else holds it, in this process or another.
      UnsafeFile, OSError: it cannot be locked.
    """

    def __init__(self, path: Path, shared: bool = False):
        self._path = path
        self._descriptor = open_to_update(path)
        # Also when it is dropped without being released.
        self._finalizer = weakref.finalize(self, _release, self._descriptor)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 20).decode(errors="replace").strip()
            self._finalizer.detach()
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise FolderInUse(holder or "unknown") from None
            raise
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, b"%d\n" % os.getpid(), 0)
        self.check()

    def check(self) -> None:
        """Makes sure that the lock still keeps others out: a lock file that was removed does not.

        Raises:
          UnsafeFile: another file has its name. OSError: it is gone.
        """
        there, mine = os.lstat(self._path), os.fstat(self._descriptor)
        if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise UnsafeFile(f"{self._path} was removed and made again: another process may use the folder")

    def release(self) -> None:
        """Lets others have the folder."""
        self._finalizer()


def _release(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.close(descriptor)
