"""One process for a folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

NAME = "lock"


class FolderInUse(Exception):
    """The folder is locked: by the process of this number, as far as that is known."""


def lock_folder(folder: Path) -> int:
    """Locks a folder until the file descriptor returned is closed, or the process ends in whatever way.

    Raises:
      FolderInUse: somebody else has locked it, in this process or another.
      OSError: it cannot be locked.
    """
    lock = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, b"%d\n" % os.getpid())
    except BlockingIOError:
        holder = os.read(lock, 20).decode(errors="replace").strip()
        os.close(lock)
        raise FolderInUse(holder or "unknown") from None
    except OSError:
        os.close(lock)
        raise
    return lock
