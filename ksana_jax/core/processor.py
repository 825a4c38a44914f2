"""This machine's processor: its instruction sets and cores. Knows no jax.

The environment variable KSANA_HIDE hides some features, so that a developer's machine simulates a lesser one:

  avx512     instruction sets AVX-512 and AMX, from XLA's compiler and the C++ compiler too
  compiler   the C++ compiler
  cores      all cores but one
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path

from ksana_jax.core.errors import ConfigError

HIDEABLE = ("avx512", "compiler", "cores")


def hidden() -> tuple[str, ...]:
    """Returns the features that KSANA_HIDE hides, in the order of `HIDEABLE`.

    Raises:
      ConfigError: it has unknown words.
    """
    given = os.environ.get("KSANA_HIDE", "")
    words = {word for part in given.split(",") if (word := part.strip())}
    if words - {*HIDEABLE}:
        raise ConfigError(f"KSANA_HIDE is {given!r}, must be names out of {', '.join(HIDEABLE)}, with commas between")
    return tuple(word for word in HIDEABLE if word in words)


def hide(core: int = 0) -> None:
    """Hides features from XLA, and pins this process and its children to one core. Call before jax starts.

    Args:
      core: index of the remaining core, modulo their number: concurrent processes take different ones.

    Raises:
      ConfigError: jax has already started, this system cannot, or KSANA_HIDE is wrong.
    """
    names, flags = hidden(), os.environ.get("XLA_FLAGS", "")
    if "avx512" in names and "--xla_cpu_max_isa" not in flags:
        bridge = sys.modules.get("jax._src.xla_bridge")
        if bridge is not None and bridge.backends_are_initialized():
            raise ConfigError("KSANA_HIDE hides avx512, and jax has already started with it")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa=AVX2".strip()
    if "cores" in names and not hasattr(os, "sched_setaffinity"):
        raise ConfigError("KSANA_HIDE hides cores, which this system cannot")
    if "cores" in names and num_cores() > 1:
        pin(sorted(os.sched_getaffinity(0))[core % num_cores()])


def num_cores() -> int:
    """Returns the number of cores that this process may use; XLA starts as many threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def pin(*cores: int) -> None:
    """Restricts all threads of this process to some cores, on Linux."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def features() -> frozenset[str]:
    """Returns the processor's instruction sets as Linux names them; empty where they are not known."""
    is_hidden = ("avx512", "amx") if "avx512" in hidden() else ()
    return frozenset(name for name in _features().split() if not name.startswith(is_hidden))


def is_arm() -> bool:
    """True of 64-bit Arm, as Linux and macOS name it. All of them have NEON."""
    return platform.machine() in ("aarch64", "arm64")


def machine() -> str:
    """Returns a name for this kind of processor, for caches whose keys do not include the instruction set, such as
    jax's."""
    kind = " ".join((_features(), *hidden()))
    return f"{platform.machine()}-{hashlib.sha256(kind.encode()).hexdigest()[:12]}"


@functools.cache
def _features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
