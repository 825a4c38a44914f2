"""Finds the library: a wheel's for this processor, or a cached one that the machine's compiler builds.

python -m ksana_jax.native.build      compiles it ahead of its first use, and says why if it cannot
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import threading
from pathlib import Path

from ksana_jax.core.compilation_cache import cache_folder
from ksana_jax.core.processor import hidden, is_arm
from ksana_jax.native import prebuilt
from ksana_jax.native.compiler import FLAGS, CannotBuild, compile_into

log = logging.getLogger(__name__)

# Without AVX-512's foundation, compilers leave out its extensions too.
WITHOUT_AVX512 = ("-mno-avx512f",)

_building = threading.Lock()


def library() -> Path:
    """Returns the compiled library: the wheel's, or the cache folder's.

    The folder is `ksana_jax/native` in the user's cache directory. A library's name is a hash of sources, headers,
    compiler, flags and instruction set. The environment variable CXX names a compiler, as "g++" or "ccache g++".

    Raises:
      CannotBuild: no compiler is found, it fails, or its library cannot be kept or loaded here.
    """
    with _building:
        found = _library()
    if isinstance(found, str):
        raise CannotBuild(found)
    return found


def why_missing() -> str | None:
    """Returns why the library is not available here, or None."""
    with _building:
        found = _library()
    return found if isinstance(found, str) else None


def was_asked() -> bool:
    """True if this process has asked for the library: nothing calls it otherwise."""
    return _library.cache_info().currsize > 0


def instructions() -> str:
    """Returns the instruction sets that the library's products use, for readers; or why the library is missing."""
    if reason := why_missing():
        return f"none: {reason}"
    name = ctypes.CDLL(str(library())).ksana_instructions
    name.restype = ctypes.c_char_p
    found = name().decode()
    if found.startswith("AVX-512") or is_arm():
        return found
    return f"{found}: {'KSANA_HIDE hides' if 'avx512' in hidden() else 'this CPU lacks'} AVX-512"


def begin() -> None:
    """Compiles in a thread while the caller imports and loads; `library` then waits for the rest."""
    threading.Thread(target=_begin, name="native build").start()


def _begin() -> None:
    with _building:
        _library()


@functools.cache
def _library() -> Path | str:
    """The library, or why it is missing; a compiler that fails is run once.

    The reason is a text: a kept exception that is raised again keeps the frames that it passes, and their engines.
    """
    try:
        return _loaded()
    except CannotBuild as error:
        reason = str(error)
    except OSError as error:
        reason = f"the compiled library cannot be kept or loaded: {error}"
    log.info("attention, products and norms of CPUs stay with XLA: %s", reason)
    return reason


def _loaded() -> Path:
    """Loads the wheel's library, else the one in the cache folder, which is compiled if missing.

    Raises:
      CannotBuild: no compiler is found, or it fails. OSError: the library cannot be written or loaded.
    """
    path = prebuilt.find()
    if path is None:
        hides = "avx512" in hidden() and platform.machine() == "x86_64"
        path = compile_into(cache_folder("native"), FLAGS + (WITHOUT_AVX512 if hides else ()))
    ctypes.CDLL(str(path))  # where the folder's file system does not let programs run, this fails
    return path


if __name__ == "__main__":
    if reason := why_missing():
        print(f"attention and products for CPUs stay with XLA: {reason}")
