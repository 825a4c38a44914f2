"""Compiles the C++ of this package with the machine's compiler and keeps the library. Knows no kernels."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ksana_jax.compilation_cache import cache_folder, machine

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared", "-pthread")
# Names of compilers, in order of preference, where the environment variable CXX has none.
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 300


class CannotBuild(NotImplementedError):
    """The library cannot be had here; the message says why."""


def library() -> Path:
    """Returns the compiled library, from the cache folder where it is there.

    The folder is `ksana_jax/native` in the user's cache directory. A library's name is a hash of sources, headers,
    compiler, flags and instruction set. The environment variable CXX names a compiler.

    Raises:
      CannotBuild: there is no compiler, or it fails.
    """
    found = _library()
    if isinstance(found, CannotBuild):
        raise found
    return found


@functools.cache
def _library() -> Path | CannotBuild:
    """The library, or why there is none; a compiler that fails is asked once."""
    import jax

    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return CannotBuild(f"no C++ compiler: none of {', '.join(COMPILERS)} is installed")
    headers = Path(jax.ffi.include_dir())
    path = cache_folder("native") / f"{_key(compiler, headers)}.so"
    try:
        if not path.exists():
            _compile(compiler, headers, path)
    except CannotBuild as reason:
        return reason
    return path


def _key(compiler: str, headers: Path) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256("\0".join((compiler, version, machine(), *FLAGS)).encode())
    for source in (*sorted(SOURCES.glob("*.[ch]*")), *sorted((headers / "xla/ffi/api").glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _compile(compiler: str, headers: Path, path: Path) -> None:
    """Compiles to a file of its own and renames it: several processes may do so at once."""
    log.info("compiling attention and products of CPUs with %s, once for this machine", compiler)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, "-isystem", str(headers), *map(str, sorted(SOURCES.glob("*.cc"))), "-o", str(made)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CannotBuild(f"{compiler} did not run: {error}") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CannotBuild(f"{compiler} failed with exit status {done.returncode}: {last}")
        made.replace(path)
