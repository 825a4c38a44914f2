"""Device, driver and versions of all that takes part."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from experiments.gpu.context import Context
from experiments.gpu.peer import TorchPeer
from ksana_jax.lab.runs.environment import environment
from pallas_kernels import aot

# Kernels as the engine uses them; compiled by the CPU for this GPU, while the rest of the section runs.
KERNELS = r"^hopper (attention( codes=\w+)?|prefill q=32( h=128 registers=False)?|mass|kv write)$"
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "torch",
    "triton",
    "transformers",
    "nvidia-cudnn-cu13",
    "nvidia-cublas",
    "nvidia-cuda-nvcc",
    "omegaconf",
    "sentencepiece",
)


def run(context: Context) -> None:
    context.record("fact", name="environment", **(context.attempt("environment", environment) or {}))
    context.record("fact", name="packages", python=platform.python_version(), **{n: _version(n) for n in PACKAGES})
    query = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.max.memory,power.limit,temperature.gpu"
    context.record("fact", name="nvidia-smi", answer=_output(["nvidia-smi", f"--query-gpu={query}", "--format=csv"]))
    device = jax.devices()[0]
    context.record(
        "fact",
        name="device",
        device_kind=device.device_kind,
        platform=device.platform,
        compute_capability=str(getattr(device, "compute_capability", "")),
        memory=context.attempt("memory_stats", device.memory_stats),
    )
    context.say(f"jax {jax.__version__} on {device.device_kind}")
    context.record("fact", name="compilers", **compilers())
    on_gpu = device.platform == "gpu"
    registers = context.attempt("registers", lambda: _compile_kernels(context)) if on_gpu else None
    peer = TorchPeer(context)
    answer = context.attempt("torch", lambda: peer.ask("versions", timeout_s=20))
    peer.close()
    if answer:
        context.record("fact", name="torch", **answer["versions"])
        context.say(f"torch {answer['versions']['torch']}")
    if registers is not None:
        context.attempt("registers", lambda: _record_registers(context, registers))


def compilers() -> dict[str, Any]:
    """Every ptxas that XLA may take, with its version; the one that Mosaic GPU takes; where XLA is told to look."""
    flags = os.environ.get("XLA_FLAGS", "")
    data_dir = next((f.split("=", 1)[1] for f in flags.split() if f.startswith("--xla_gpu_cuda_data_dir=")), "")
    places = [data_dir, os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]
    found = [aot.find_ptxas(), shutil.which("ptxas"), *(str(Path(p) / "bin/ptxas") for p in places if p)]
    paths = dict.fromkeys(p for p in found if p and Path(p).is_file())
    return {
        "ptxas": {path: _output([path, "--version"]).splitlines()[-1:] for path in paths},
        "mosaic": shutil.which("ptxas"),
        "cuda_data_dir": data_dir,
        "XLA_FLAGS": flags,
        **{name: os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "MOSAIC_GPU_DUMP_TO")},
    }


def _compile_kernels(context: Context) -> subprocess.Popen:
    if line := aot.missing():
        raise NotImplementedError(line)
    command = [
        sys.executable,
        "-m",
        "tests.kernel_report",
        "--target",
        "h200",
        "--only",
        KERNELS,
        "--json",
        str(context.folder / "kernels.json"),
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _record_registers(context: Context, process: subprocess.Popen) -> None:
    process.wait(max(context.left() - 1, 1))
    rows = json.loads((context.folder / "kernels.json").read_text())["kernels"]
    for row in rows:
        kept = ("kernel", "config", "registers", "spill_bytes", "shared_bytes", "reason")
        context.record("fact", name="kernel", **{key: row.get(key) for key in kept})
    most = max((row["registers"] for row in rows if row.get("registers")), default=0)
    context.value("registers of a thread, most of any kernel", most, f"in {len(rows)} kernels", speed=False)


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
