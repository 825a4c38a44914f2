"""Opens files in folders that others may write to: cache folders, output folders. Standard library only.

Whoever can write to a folder can put a link or a FIFO under a name that is about to be used. Opened as usual, the file
that the link leads to would be emptied, and the FIFO would wait for ever. What is opened here to be written is a plain
file of this folder alone, and nothing here waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

from ksana_jax.errors import ConfigError


class UnsafeFile(OSError, ConfigError):
    """A link, a FIFO or the like stands where a plain file belongs: one line that says which."""


def open_to_read(path: Path, buffering: int = -1) -> BufferedReader:
    """Opens a plain file, through links too: reading changes nothing.

    Raises:
      UnsafeFile: it is a FIFO, a folder, a device.
      OSError: it cannot be opened.
    """
    return cast(BufferedReader, open(_open(path, os.O_RDONLY), "rb", buffering))


def read_bytes(path: Path) -> bytes:
    """Reads a plain file; see `open_to_read`."""
    with open_to_read(path) as file:
        return file.read()


def open_to_update(path: Path, flags: int = 0) -> int:
    """Opens a plain file of this folder for reading and writing, as it is, or makes it.

    Returns:
      A file descriptor.

    Raises:
      UnsafeFile: it is a link, has a second name (a hard link), or is no plain file.
      OSError: it cannot be opened.
    """
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | flags)


def create(path: Path) -> BinaryIO:
    """Makes a new file for writing.

    Raises:
      FileExistsError: there is something of this name, be it a link that leads nowhere.
      OSError: it cannot be made.
    """
    return open(path, "xb")  # O_EXCL follows no link


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a temporary file that takes the name of path when the block ends well, and goes when it does not.

    A reader sees the old content or the new, never a part. A link at path is replaced; what it leads to stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)  # of a process that had the same number, and was killed
    with create(temporary) as file:
        try:
            yield file
            file.flush()
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a file so that a reader sees the old content or the new; see `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _open(path: Path, flags: int) -> int:
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for its other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
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
