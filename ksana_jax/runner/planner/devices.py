"""Devices to plan for, with their memory sizes. Knows no models, and uses jax only to query this machine."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from ksana_jax.core.config import ConfigError
from ksana_jax.core.units import GIB, MIB
from ksana_jax.devices.platforms import platform_of


@dataclasses.dataclass(frozen=True)
class Device:
    """An accelerator, or this machine.

    memory_bytes: memory size. l2_bytes: size of the last cache before that memory; None if none is published.
    target: name of a target of `pallas_kernels.aot` for ahead-of-time compilation; None without one.
    """

    name: str
    memory_bytes: int
    l2_bytes: int | None = None
    target: str | None = None


# Capacities from the manufacturers' data sheets, whose GB are 2**30 bytes: an H200 "141GB" reports 140.4 GiB to
# programs, an A100 "80GB" 80.0. `memory_fraction` leaves room for the driver's reserve.
DEVICES = {
    d.name: d
    for d in (
        Device("h200", 141 * GIB, 50 * MIB, "h200"),  # NVIDIA H200 data sheet; L2 as H100
        Device("h100", 80 * GIB, 50 * MIB, "h100"),  # NVIDIA H100 Tensor Core GPU Architecture, table 1 (SXM5)
        Device("a100-80g", 80 * GIB, 40 * MIB, "a100"),  # NVIDIA A100 data sheet; L2 from the Ampere architecture paper
        Device("a100-40g", 40 * GIB, 40 * MIB, "a100"),
        Device("v100-32g", 32 * GIB, 6 * MIB),  # NVIDIA Tesla V100 GPU Architecture, table 1: 6144 KB of L2
        Device("ascend-910b", 64 * GIB),  # Huawei Atlas 800T A2: 64 GB of HBM per 910B
    )
}
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def find_device(name: str | int) -> Device:
    """Returns a device by name, this machine for "cpu", or a device of a given size: 25769803776, "24GiB", "80 GB".

    Raises:
      ConfigError: it is neither a name nor a number of bytes.
    """
    text = str(name).strip().lower()
    if text in DEVICES:
        return DEVICES[text]
    if text == "cpu":
        return Device("cpu", physical_bytes())
    number = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?i?b|)", text)
    if number is None or number[2] not in _UNITS:
        raise ConfigError(f"device is {name!r}, must be one of {', '.join(DEVICES)}, cpu, or bytes such as 24GiB")
    num_bytes = int(float(number[1]) * _UNITS[number[2]]) if number[2] else int(float(number[1]))
    if num_bytes < 1:
        raise ConfigError(f"device is {name!r}, must have at least one byte")
    return Device(_written(num_bytes), num_bytes)


def compile_target(device: Device):
    """Returns the `aot.Target` for compiling steps for a device; None if that is impossible, or for this machine."""

    from pallas_kernels import aot

    if device.target is None or aot.missing():
        return None
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else XLA warns that it has no GPU to measure on
    if platform_of() != "cpu":
        return None
    return aot.target(device.target)


def _written(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.4g} GiB" if num_bytes >= GIB else f"{num_bytes:,} bytes"


def physical_bytes() -> int:
    """Returns the memory in bytes of this machine, or of the container that this process runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def available_bytes() -> int:
    """Returns the memory in bytes that is left on this machine, swap included, or in the container of this process."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return physical_bytes()
    free = sum(int(n) * 1024 for n in re.findall(r"^(?:MemAvailable|SwapFree): +(\d+) kB$", text, re.MULTILINE))
    try:  # what processes hold; pages of files can be dropped
        held = re.search(r"^anon (\d+)$", Path("/sys/fs/cgroup/memory.stat").read_text(), re.MULTILINE)
    except OSError:
        held = None
    return min(free, physical_bytes() - int(held[1])) if held else free


def this_device(num_devices: int = 1) -> Device:
    """Returns the engine's device: jax's first device with its allocator's limit, or this machine with its memory.

    Args:
      num_devices: devices of the engine; on a CPU they share its memory.

    Raises:
      ConfigError: neither the device nor the setting `device` states the device's memory.
    """
    from ksana_jax.devices.capabilities import capabilities

    found = capabilities()
    if found.shares_host_memory:
        return Device(found.platform, physical_bytes() // num_devices)
    if found.memory_bytes is None:
        raise ConfigError(
            f"{found.platform} ({found.kind}) does not report its memory: give it as device.memory_bytes, or "
            "num_blocks instead of memory_fraction"
        )
    return Device(found.kind, found.memory_bytes)
