"""Compiles the C++ of this package with the machine's compiler. Knows no kernels."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
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
    """Compiles the library with flags into a folder, unless it exists, and returns its path.

    Raises:
      CannotBuild: no compiler is found, or it fails. OSError: the library cannot be written.
    """
    import jaxlib

    compiler = compiler_command()
    headers = Path(jaxlib.__path__[0]) / "include"  # jax.ffi.include_dir(), which takes a second to import
    path = folder / f"{prefix}{_key(compiler, flags, headers)}.so"
    if not path.exists():
        _compile([*compiler, *flags], headers, path)
    return path


def _key(compiler: list[str], flags: Sequence[str], headers: Path) -> str:
    version = _run([*compiler, "--version"])
    digest = hashlib.sha256("\0".join((*compiler, version, machine(), *flags)).encode())
    for source in (*sorted(SOURCES.glob("*.[ch]*")), *sorted((headers / "xla/ffi/api").glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _compile(compiler: list[str], headers: Path, path: Path) -> None:
    """Compiles sources side by side, links to a temporary file and renames it: several processes may do so at once."""
    log.info("compiling attention, products and norms of CPUs with %s, once for this machine", shlex.join(compiler))
    path.parent.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCES.glob("*.cc"))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor(len(sources)) as pool:
        objects = [str(Path(folder) / f"{source.stem}.o") for source in sources]
        commands = [
            [*compiler, "-isystem", str(headers), "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run, commands))
        made = Path(folder) / path.name
        _run([*compiler, "-shared", *objects, "-o", str(made)])
        made.replace(path)


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
