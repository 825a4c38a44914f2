"""Device, driver and versions of all that takes part."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata

import jax

from experiments.environment import environment
from experiments.gpu.context import Context
from experiments.gpu.peer import TorchPeer

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "torch", "triton", "transformers",
            "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-cuda-nvcc", "omegaconf", "sentencepiece")  # fmt: skip


def run(context: Context) -> None:
    context.record("fact", name="environment", **(context.attempt("environment", environment) or {}))
    context.record("fact", name="packages", python=platform.python_version(), **{n: _version(n) for n in PACKAGES})
    query = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.max.memory,power.limit,temperature.gpu"
    context.record("fact", name="nvidia-smi", answer=_output(["nvidia-smi", f"--query-gpu={query}", "--format=csv"]))
    device = jax.devices()[0]
    context.record("fact", name="device", device_kind=device.device_kind, platform=device.platform,
                   compute_capability=str(getattr(device, "compute_capability", "")),
                   memory=context.attempt("memory_stats", device.memory_stats))  # fmt: skip
    context.say(f"jax {jax.__version__} on {device.device_kind}")
    peer = TorchPeer(context)
    answer = context.attempt("torch", lambda: peer.ask("versions", timeout_s=20))
    peer.close()
    if answer:
        context.record("fact", name="torch", **answer["versions"])
        context.say(f"torch {answer['versions']['torch']}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
