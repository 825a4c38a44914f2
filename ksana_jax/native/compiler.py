"""Compiles the C++ of this package with the machine's compiler. Knows no kernels."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ksana_jax.core.processor import hidden, machine

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
# Flags of a library for any processor, and for this one.
PORTABLE = ("-std=c++17", "-O3", "-fPIC", "-pthread")
FLAGS = (*PORTABLE, "-march=native")
# Names of compilers, in order of preference, used without the environment variable CXX.
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 300
_BUILD = ".build-"


class CannotBuild(NotImplementedError):
    """The library is not available here; the message says why."""


def compiler_command() -> list[str]:
    """Returns the command of the C++ compiler, without arguments of this package.

    Raises:
      CannotBuild: no compiler is found.
    """
    if "compiler" in hidden():
        raise CannotBuild("no C++ compiler: KSANA_HIDE hides it")
    given = os.environ.get("CXX", "")
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise CannotBuild(f"CXX is {given!r}: {error}") from error
    if not command:
        command = [found for name in COMPILERS if (found := shutil.which(name))][:1]
    if not command:
        raise CannotBuild(f"no C++ compiler: none of {', '.join(COMPILERS)} is installed")
    return command


def compile_into(folder: Path, flags: Sequence[str], prefix: str = "") -> Path:
    """Compiles the library with flags into a folder, unless it is there, and returns its path.

    Its name ends with a digest of the file: loading a truncated library kills the process.

    Raises:
      CannotBuild: no compiler is found, or it fails. OSError: the library cannot be written.
    """
    import jaxlib

    compiler = compiler_command()
    headers = Path(jaxlib.__path__[0]) / "include"  # jax.ffi.include_dir(), which takes a second to import
    name = f"{prefix}{_key(compiler, flags, headers)}"
    _remove_unfinished(folder)
    for path in folder.glob(f"{name}-*.so"):
        if path.name == _named(name, path):
            return path
        log.info("%s is damaged, and compiled again", path)
        path.unlink(missing_ok=True)
    return _compile([*compiler, *flags], headers, folder, name)


def _named(name: str, path: Path) -> str:
    return f"{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:24]}.so"


def _remove_unfinished(folder: Path) -> None:
    """Removes folders of builds whose processes have ended: a process locks its own."""
    for left in folder.glob(f"{_BUILD}*/"):
        with contextlib.suppress(OSError), _locked(left, fcntl.LOCK_NB):
            if any(left.iterdir()) or time.time() - left.stat().st_mtime > BUILD_TIMEOUT_S:  # it has been locked
                shutil.rmtree(left)


@contextlib.contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)


def _key(compiler: list[str], flags: Sequence[str], headers: Path) -> str:
    version = _run([*compiler, "--version"])
    digest = hashlib.sha256("\0".join((*compiler, version, machine(), *flags)).encode())
    for source in (*sorted(SOURCES.glob("*.[ch]*")), *sorted((headers / "xla/ffi/api").glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _compile(compiler: list[str], headers: Path, folder: Path, name: str) -> Path:
    """Compiles sources side by side, links to a temporary file and renames it: several processes may do so at once."""
    log.info("compiling attention, products and norms of CPUs with %s, once for this machine", shlex.join(compiler))
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCES.glob("*.cc"))
    with contextlib.ExitStack() as stack:
        build = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=_BUILD)))
        stack.enter_context(_locked(build))
        pool = stack.enter_context(ThreadPoolExecutor(len(sources)))
        objects = [str(build / f"{source.stem}.o") for source in sources]
        commands = [
            [*compiler, "-isystem", str(headers), "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run, commands))
        made = build / "library.so"
        _run([*compiler, "-shared", *objects, "-o", str(made)])
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        return made.replace(folder / _named(name, made))


def _run(command: list[str]) -> str:
    """Returns the output of a compiler command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CannotBuild(f"{command[0]} failed with exit status {done.returncode}: {last}")
    return done.stdout
