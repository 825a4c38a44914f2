"""Describes the environment of a run: commit, versions, device."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from ksana_jax.core.processor import features, num_cores
from ksana_jax.devices.platforms import platform_of

_PACKAGES = (
    "ksana-jax",
    "jax",
    "jaxlib",
    "numpy",
    "safetensors",
    "sentencepiece",
    "tokenizers",
    "omegaconf",
    "matplotlib",
)

# Instruction sets that kernels and compilers choose by, as Linux names them.
_INSTRUCTIONS = "avx2 avx512f avx512_vnni avx512_bf16 amx_int8 amx_bf16 asimd asimddp i8mm bf16 sve".split()


@functools.cache
def environment() -> dict[str, Any]:
    """Returns the environment of the host and its device. Starts jax."""
    import jax

    device = jax.devices()[0]
    return {
        **host_environment(),
        "backend": platform_of(device),
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "matmul_precision": jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
    }


@functools.cache
def host_environment() -> dict[str, Any]:
    """Returns commit and dirty flag (None outside a git checkout), versions, processor, cores and XLA flags. No jax."""
    return {
        **_git(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "instructions": " ".join(name for name in _INSTRUCTIONS if name in features()),
        # Identifies trials that run on the same machine, without revealing its name.
        "machine": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "cores": num_cores(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def cpu_model() -> str:
    """Returns the name of the processor from /proc/cpuinfo, or else from the platform."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path) -> dict[str, Any]:
    def git(*args: str) -> str | None:
        command = ["git", "-C", str(folder), *args]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    # A copy installed inside another project's checkout does not belong to that checkout.
    tracked = git("ls-files", "--error-unmatch", Path(__file__).name) is not None
    if commit is None or not tracked:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
