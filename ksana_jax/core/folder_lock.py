"""Locks a folder, through a file in it, so that two processes cannot use it at the same time."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from ksana_jax.core.files import UnsafeFile, open_to_update


class FolderInUse(Exception):
    """The folder is locked; the message is the pid of the holder, or "unknown"."""


class FolderLock:
    """Holds a lock file until it is released or the process ends. A forked child does not hold it.

    Args:
      path: the lock file; created if it does not exist, and never removed.
      shared: allow other holders that also share it.
      mode: permissions of a new lock file, less the umask.

    Raises:
      FolderInUse: another holder has the lock, in this process or another.
      UnsafeFile, OSError: it cannot be locked.
    """

    def __init__(self, path: Path, shared: bool = False, mode: int = 0o666):
        self._path = path
        self._descriptor = open_to_update(path, mode=mode)
        # Releases the lock even if this object is dropped without `release`.
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
        _held.add(self)
        self.check()

    def check(self) -> None:
        """Checks that the lock is still effective, which it is not if the lock file was removed.

        Raises:
          UnsafeFile: another file has its name. OSError: it was deleted.
        """
        there, mine = os.lstat(self._path), os.fstat(self._descriptor)
        if (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise UnsafeFile(f"{self._path} was removed and created again: another process may use the folder")

    def release(self) -> None:
        """Releases the lock."""
        self._finalizer()

    def _leave_to_parent(self) -> None:
        """Closes a forked child's copy of the descriptor, with which it would hold the lock for its lifetime."""
        if self._finalizer.detach():
            os.close(self._descriptor)


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _in_child() -> None:
    for lock in list(_held):
        lock._leave_to_parent()


os.register_at_fork(after_in_child=_in_child)


def _release(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.close(descriptor)
