"""Folders whose files this process executes: only this user may write there. Standard library only."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from ksana_jax.core.files import UnsafeFile


def make_private(folder: Path) -> None:
    """Creates a folder of mode 0700, or checks that only this user can write to it or replace it.

    Raises:
      UnsafeFile: another user can; the message says where.
      OSError: it cannot be created.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UnsafeFile(f"{folder} must be a folder of this user with mode 0700, and no link")
    for parent in {*folder.parents, *folder.resolve().parents}:
        if reason := _unsafe(os.lstat(parent)):
            raise UnsafeFile(f"{folder} is not private: {parent} {reason}")


def open_private(path: Path) -> int:
    """Opens a file of a private folder for reading; returns its descriptor.

    Raises:
      UnsafeFile: it is no plain file, or another user can write to it.
      OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        os.close(descriptor)
        raise UnsafeFile(f"{path} must be a plain file that only this user can write")
    return descriptor


def _unsafe(found: os.stat_result) -> str | None:
    """Returns why others can replace what a parent folder contains, or a link to one points to; or None."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None  # in a sticky folder, such as /tmp, only owners rename and delete
    if found.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"can be written by group {found.st_gid}"
    return None


def _is_own_group(group: int) -> bool:
    """True of a group that has no member but this user, or root."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group in (0, user.pw_gid) and found.gr_name in ("root", user.pw_name) and set(found.gr_mem) <= {user.pw_name}
