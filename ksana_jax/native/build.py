"""Compiles the C++ of this package with the machine's compiler and keeps the library. Knows no kernels.

python -m ksana_jax.native.build      compiles it ahead of its first use, and says why where that cannot be
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ksana_jax.core.compilation_cache import cache_folder
from ksana_jax.core.processor import hidden, machine

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread")
# Without AVX-512's foundation, compilers leave out its extensions too.
WITHOUT_AVX512 = ("-mno-avx512f",)
# Names of compilers, in order of preference, where the environment variable CXX has none.
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 300


_building = threading.Lock()


class CannotBuild(NotImplementedError):
    """The library cannot be had here; the message says why."""


def library() -> Path:
    """Returns the compiled library, from the cache folder where it is there.

    The folder is `ksana_jax/native` in the user's cache directory. A library's name is a hash of sources, headers,
    compiler, flags and instruction set. The environment variable CXX names a compiler, as "g++" or "ccache g++".

    Raises:
      CannotBuild: there is no compiler, it fails, or its library cannot be kept or loaded here.
    """
    with _building:
        found = _library()
    if isinstance(found, str):
        raise CannotBuild(found)
    return found


def why_missing() -> str | None:
    """Returns why the library cannot be had here, or None."""
    with _building:
        found = _library()
    return found if isinstance(found, str) else None


def instructions() -> str:
    """Returns the instruction sets that the library's products use, for readers; or why there is no library."""
    if reason := why_missing():
        return f"none: {reason}"
    name = ctypes.CDLL(str(library())).ksana_instructions
    name.restype = ctypes.c_char_p
    found = name().decode()
    if found.startswith("AVX-512"):
        return found
    return f"{found}: {'KSANA_HIDE hides' if 'avx512' in hidden() else 'this CPU lacks'} AVX-512"


def begin() -> None:
    """Compiles in a thread while the caller imports and loads what it needs; `library` then waits for the rest."""
    threading.Thread(target=_begin, name="native build").start()


def _begin() -> None:
    with _building:
        _library()


@functools.cache
def _library() -> Path | str:
    """The library, or why there is none; a compiler that fails is asked once.

    The reason is a text: a kept exception that is raised again keeps the frames that it passes, and their engines.
    """
    try:
        return _built(compiler_command())
    except CannotBuild as error:
        reason = str(error)
    except OSError as error:
        reason = f"the compiled library cannot be kept or loaded: {error}"
    log.info("attention, products and norms of CPUs stay with XLA: %s", reason)
    return reason


def compiler_command() -> list[str]:
    """Returns the command of the C++ compiler, without arguments of this package.

    Raises:
      CannotBuild: there is none.
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


def _built(compiler: list[str]) -> Path:
    """Compiles the library unless it is in the cache folder, and loads it.

    Raises:
      CannotBuild: the compiler fails. OSError: the library cannot be written or loaded.
    """
    import jaxlib

    headers = Path(jaxlib.__path__[0]) / "include"  # jax.ffi.include_dir(), which takes a second to import
    flags = FLAGS + (WITHOUT_AVX512 if "avx512" in hidden() and platform.machine() == "x86_64" else ())
    path = cache_folder("native") / f"{_key(compiler, flags, headers)}.so"
    if not path.exists():
        _compile([*compiler, *flags], headers, path)
    ctypes.CDLL(str(path))  # where the folder's file system does not let programs run, this fails
    return path


def _key(compiler: list[str], flags: Sequence[str], headers: Path) -> str:
    version = _run([*compiler, "--version"])
    digest = hashlib.sha256("\0".join((*compiler, version, machine(), *flags)).encode())
    for source in (*sorted(SOURCES.glob("*.[ch]*")), *sorted((headers / "xla/ffi/api").glob("*.h"))):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _compile(compiler: list[str], headers: Path, path: Path) -> None:
    """Compiles sources side by side, links to a file of its own and renames it: several processes may do so at once."""
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
    """Returns what a command of the compiler prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CannotBuild(f"{command[0]} failed with exit status {done.returncode}: {last}")
    return done.stdout


if __name__ == "__main__":
    if reason := why_missing():
        print(f"attention and products for CPUs stay with XLA: {reason}")
