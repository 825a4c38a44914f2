"""Keeps compiled programs on disk between processes, so that a warm start neither traces nor lowers them.

A file is an entry: a header in JSON, and executables as jax serialises them. Loading one runs code, so the folder must
be private (`core.private_folder`). Whatever is wrong with an entry, the program is compiled as without it.

The environment variable KSANA_PROGRAMS turns the store "off", or has it "check": programs are traced nevertheless, and
one that differs from its entry raises `WrongProgram`. KSANA_PROGRAMS_DIR names another folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax

from ksana_jax.core.compilation_cache import cache_folder, watch_cache
from ksana_jax.core.files import replacing
from ksana_jax.core.private_folder import make_private, open_private
from ksana_jax.devices.platforms import platform_of
from ksana_jax.runner.program_key import Lowering, bindings, digest_of, has_edits, traced_modules
from ksana_jax.runner.program_memory import bytes_of
from ksana_jax.runner.stored_program import Program, StoredProgram, described, serialised
from ksana_jax.runner.value_digest import NotStored, Walk

logger = logging.getLogger("ksana_jax")

# Entries that were not used for longest are removed beyond this size, until nine tenths of it remain.
MAX_STORE_BYTES = 2 * 2**30
SWITCH, FOLDER = "KSANA_PROGRAMS", "KSANA_PROGRAMS_DIR"
_MAGIC, _LENGTH_BYTES = b"ksana_jax program 1\n", 4
_START_BYTES = len(_MAGIC) + hashlib.sha256().digest_size


class WrongProgram(RuntimeError):
    """A stored program is not the one that this process would compile; please report it."""


def store_folder() -> Path:
    """Returns the folder of the entries, which may not exist.

    Raises:
      OSError: the user has no home directory.
    """
    return Path(os.environ.get(FOLDER) or cache_folder("programs"))


def why_off() -> str | None:
    """Returns why this process stores no programs, or None."""
    if os.environ.get(SWITCH) == "off":
        return f"{SWITCH} is off"
    if not jax.config.jax_enable_compilation_cache:  # pyright: ignore[reportAttributeAccessIssue]
        return "JAX_ENABLE_COMPILATION_CACHE is false"
    if (platform := platform_of()) != "cpu":
        return f"programs of CPUs are stored, not those of {platform}"
    if jax.process_count() > 1:
        return "programs of several processes are not stored"
    try:
        return _why_unsafe(store_folder())
    except OSError as error:
        return str(error)


@functools.cache
def _why_unsafe(folder: Path) -> str | None:
    try:
        return make_private(folder)
    except OSError as error:
        logger.warning("compiled programs are not stored: %s", error)
        return str(error)


@functools.cache
def _say(reason: str) -> None:
    logger.info("some programs are not stored: %s", reason)


def places(lowerings: Mapping[Any, Lowering]) -> dict[Any, Place]:
    """Returns the place in the store of each program, by key, unless it cannot be stored. lowerings: of shapes."""
    if why_off() is not None:
        return {}
    watch_cache()
    walk, found, folder, bound = Walk(), {}, store_folder(), functools.cache(bindings)
    for key, lower in lowerings.items():
        try:
            found[key] = Place(folder / digest_of(lower, walk), lower, bound)
        except NotStored as error:
            _say(str(error))
    return found


class Place:
    """Where a program is in the store, or will be.

    Args:
      path: of its entry. lower: compiles it, if it cannot be loaded. bound: `bindings` of a tuple of modules.
    """

    def __init__(self, path: Path, lower: Lowering, bound: Callable[[tuple[str, ...]], str]):
        self.path, self.lower, self._bound = path, lower, bound
        self._loaded, self._lock = None, threading.Lock()

    def read(self) -> Callable | None:
        """Returns the program, which is loaded when it is first called; None if there is no entry for this process.

        Raises:
          WrongProgram: with KSANA_PROGRAMS "check", the program would be another one today.
        """
        try:
            with open(open_private(self.path), "rb") as file:
                header = _header(file)
            if self._bound(tuple(header["modules"])) != header["bindings"]:
                return None
            sizes = [each["bytes"] for each in header["programs"]]
        except FileNotFoundError:
            return None
        except (NotStored, OSError, ImportError, ValueError, KeyError, TypeError) as error:
            return _say(f"{self.path}: {error}")
        with contextlib.suppress(OSError):
            os.utime(self.path)
        if os.environ.get(SWITCH) == "check" and header["texts"] != _texts(self.lower.parts(self.lower())):
            raise WrongProgram(f"{self.path}: {self.lower.func.__name__} lowers to another program today")
        loads = (functools.partial(self._program, header, number) for number in range(len(sizes)))
        return self.lower.assembled(list(map(StoredProgram, loads, sizes)))

    def write(self, lowered: Sequence[Any], compiled: Sequence[tuple[Any, Any]]) -> None:
        """Writes an entry, if that is possible, of programs (`jax.stages.Lowered`) and their `compile_to_keep`."""
        try:
            if has_edits():
                raise NotStored("the package was edited after this process had started")
            programs, contents, modules = [], [serialised(*each) for each in compiled], traced_modules()
            for (program, _), content in zip(compiled, contents, strict=True):
                about = {"size": len(content), "sum": hashlib.sha256(content).hexdigest(), "bytes": bytes_of(program)}
                programs.append(about | described(program))
            about = {"modules": modules, "bindings": bindings(modules), "texts": _texts(lowered), "programs": programs}
            header = json.dumps(about).encode()
            start = _MAGIC + hashlib.sha256(header).digest() + len(header).to_bytes(_LENGTH_BYTES)
            with replacing(self.path, 0o600) as file:
                file.write(b"".join((start, header, *contents)))
                size = file.tell()
            _trim(self.path.parent, size)
        except (NotStored, OSError) as error:
            _say(str(error))

    def _load(self, header: Mapping[str, Any]) -> list[Program]:
        with open(open_private(self.path), "rb") as file:
            if _header(file) != header:
                raise ValueError(f"{self.path} has changed")
            contents = [file.read(each["size"]) for each in header["programs"]]
        for each, content in zip(header["programs"], contents, strict=True):
            if hashlib.sha256(content).hexdigest() != each["sum"]:
                raise ValueError(f"{self.path} is damaged")
        each = zip(header["programs"], contents, strict=True)
        return [Program(content, about["devices"], about["results"]) for about, content in each]

    def _program(self, header: Mapping[str, Any], number: int) -> Any:
        """Returns one of the programs, which are loaded together when one is called."""
        with self._lock:
            if self._loaded is None:
                try:
                    self._loaded = self._load(header)
                except Exception as error:  # any of XLA's, too
                    logger.warning("a stored program is compiled again: %s", error)
                    self._loaded = [each.compile() for each in self.lower.parts(self.lower())]
        return self._loaded[number]


def _header(file: BinaryIO) -> dict[str, Any]:
    start = file.read(_START_BYTES + _LENGTH_BYTES)
    header = file.read(int.from_bytes(start[_START_BYTES:]))
    if start[:_START_BYTES] != _MAGIC + hashlib.sha256(header).digest():
        raise ValueError("it is damaged, or of another version")
    return json.loads(header)


def _texts(lowered: Sequence[Any]) -> list[str]:
    return [hashlib.sha256(each.as_text().encode()).hexdigest() for each in lowered]


_since_trim: dict[Path, int] = {}


def _trim(folder: Path, new_bytes: int) -> None:
    """Removes old entries if the folder has grown too large; looks after each 16th of the limit, and at first."""
    _since_trim[folder] = _since_trim.get(folder, MAX_STORE_BYTES) + new_bytes
    if _since_trim[folder] < MAX_STORE_BYTES // 16:
        return
    _since_trim[folder], found = 0, entries(folder)
    size = sum(size for _, size, _ in found)
    least = size if size <= MAX_STORE_BYTES else MAX_STORE_BYTES * 9 // 10
    for _, of_entry, path in found:
        if size <= least:
            break
        path.unlink(missing_ok=True)
        size -= of_entry


def entries(folder: Path) -> list[tuple[float, int, Path]]:
    """Returns (time of last use, bytes, path) of each entry, those not used for longest first; see `Place.read`."""
    if not folder.is_dir():
        return []
    found = [(path, path.lstat()) for path in folder.iterdir() if len(path.name) == 64]
    return sorted((stat.st_mtime, stat.st_size, path) for path, stat in found)
