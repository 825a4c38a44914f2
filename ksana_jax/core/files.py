"""Safely opens files in folders that others can write to, such as cache and output folders. Standard library only.

Anyone who can write to a folder can put a link or a FIFO under a name that is about to be used. With a plain open, the
target of the link would be truncated, and the FIFO would block forever. The functions here write only to plain files
of the folder itself, and never block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import secrets
import stat
import time
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError


def path_problem(name: str, value: Any) -> str | None:
    """Returns the problem with a setting that must be a path, or None. The system raises "embedded null byte" alone."""
    is_path = isinstance(value, (str, os.PathLike)) and "\0" not in os.fspath(value)
    return None if is_path else f"{name} is {checks.shown(value)}, must be a path without NUL characters"


class UnsafeFile(OSError, ConfigError):
    """A path is a link, a FIFO or the like instead of a plain file; one line says which."""


def open_to_read(path: Path, buffering: int = -1) -> BufferedReader:
    """Opens a plain file for reading, following links.

    Raises:
      UnsafeFile: it is a FIFO, a folder or a device.
      OSError: it cannot be opened.
    """
    return cast(BufferedReader, open(_open(path, os.O_RDONLY), "rb", buffering))


def read_bytes(path: Path) -> bytes:
    """Reads a plain file; see `open_to_read`."""
    with open_to_read(path) as file:
        return file.read()


def open_to_update(path: Path, flags: int = 0, mode: int = 0o666) -> int:
    """Opens a plain file for reading and writing without truncating it, or creates it.

    Args:
      mode: permissions of a new file, less the umask.

    Returns:
      A file descriptor.

    Raises:
      UnsafeFile: it is a link, has several hard links, or is not a plain file.
      OSError: it cannot be opened.
    """
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags, mode)


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Creates a new file for writing.

    Args:
      mode: its permissions, less the umask.

    Raises:
      FileExistsError: the name exists, even as a dangling link.
      OSError: it cannot be created.
    """
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))  # O_EXCL follows no link


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Opens a temporary file that replaces path if the block succeeds, and is removed otherwise; mode: see `create`.

    A reader sees the old or the new content, never a part. A link at path is replaced, its target is left alone. A
    process's first call for a folder removes what killed processes have left there.
    """
    _remove_once(path.parent.absolute())
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with create(temporary, mode) as file:
        try:
            _hold(file)
            yield file
            file.flush()
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise


def _hold(file: BinaryIO) -> None:
    """Locks a file as long as this process has it open. Where the file system has no locks, nothing is removed."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)


@functools.lru_cache(1024)
def _remove_once(folder: Path) -> None:
    remove_leftovers(folder, "*")


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Removes temporary files of `replacing`, for files of a pattern, whose processes have ended, here or elsewhere."""
    for path in folder.glob(f".{pattern}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError), open_to_read(path) as file:
            # Its process locks it before it writes.
            if file.seek(0, os.SEEK_END) or time.time() - os.fstat(file.fileno()).st_mtime > 60:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file atomically: a reader sees the old or the new content; see `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _open(path: Path, flags: int, mode: int = 0o666) -> int:
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for its other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) and os.path.lexists(path):
            raise UnsafeFile(f"{path} is {_kind(os.lstat(path).st_mode)}, must be a plain file") from None
        raise
    found = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(found.st_mode):
        problem = f"is {_kind(found.st_mode)}, must be a plain file"
    elif flags & os.O_CREAT and found.st_nlink > 1:
        problem = f"is one of {found.st_nlink} names of a file (hard links), must be its only one"
    if problem:
        os.close(descriptor)
        raise UnsafeFile(f"{path} {problem}")
    return descriptor


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISLNK, "a link"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISDIR, "a folder"))
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device or a socket")


def require_folder(name: str, path: Path | None) -> None:
    """Raises ConfigError if a folder neither exists nor can be made, because something else has its name."""
    if path is None:
        return
    there = next(part for part in (path, *path.absolute().parents) if part.exists())
    if not there.is_dir():
        raise ConfigError(f"{name} is {str(path)!r}, must be a folder, and {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} is {str(path)!r}, and {there} may not be written to")
