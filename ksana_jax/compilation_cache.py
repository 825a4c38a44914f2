"""Compiled steps kept on disk from one run to the next. Sets environment variables; jax stays unimported."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from pathlib import Path

MAX_CACHE_BYTES = 2 * 2**30


def keep_compiled_steps(folder: Path) -> None:
    """Lets jax keep what it compiles under a folder, unless the environment already says where, or that it should not.

    Must come before jax is first imported. A folder beyond MAX_CACHE_BYTES starts afresh: every change of a step leaves
    its old entry behind.
    """
    folder = folder / _machine()
    try:
        if folder.is_dir() and sum(entry.stat().st_size for entry in folder.iterdir()) > MAX_CACHE_BYTES:
            shutil.rmtree(folder)
    except OSError:  # another process is at it
        pass
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def _machine() -> str:
    """A name for this kind of CPU: jax's cache keys carry its version and flags, but not the instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
