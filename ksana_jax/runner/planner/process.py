"""Measures the memory of this process and of its device, and jax's own share of it on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import jax

from ksana_jax.core.units import MIB
from ksana_jax.devices.capabilities import capabilities
from ksana_jax.runner.step_runs import compiled_programs
from ksana_jax.scheduler.step.types import StepShape

# Memory that the compiler keeps after its first use, that each function keeps, and that a step keeps for each part
# (decodes, tiles) and each program of layers. Measured on XLA:CPU of jax 0.10.2 and 0.12, with ksana-tiny and eight
# layers of bench-s, 10 to 28 functions. jax 0.12 takes up to 80 MiB less, a busy machine up to 70 MiB more: these
# numbers are in between.
# If all programs come from the compilation cache, the compiler is never used and takes about 100 MiB less.
COMPILER_BYTES = 145 * MIB
FUNCTION_BYTES = 4 * MIB
LAYER_PROGRAM_PART_BYTES = 5 * MIB


def resident_bytes(highest: bool = False) -> int | None:
    """Returns the current or peak resident memory of this process; None without /proc (not Linux)."""
    jax.devices()  # allocates the memory of jax's backend
    if not highest:
        return_free_memory()
    field = "VmHWM:" if highest else "VmRSS:"
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
    except OSError:
        return None


def return_free_memory() -> None:
    """Returns freed memory from the C library to the system: compiling Python's sources alone leaves 40 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def device_peak_bytes() -> int | None:
    """Returns the peak bytes of the first device's allocator; on the CPU, the process's; None if
    the device does not report them."""
    device = jax.local_devices()[0]
    if capabilities(device).shares_host_memory:
        return resident_bytes(highest=True)
    if capabilities(device).memory_bytes is None:
        return None
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def compiled_bytes(functions: Mapping[Any, Any]) -> int:
    """Returns the bytes that XLA:CPU keeps of compiled functions in memory. functions: `Runner.programs`."""
    steps = [(key, compiled_programs(found)) for key, found in functions.items() if isinstance(key, StepShape)]
    parts = sum(len(shape.parts) * (len(programs) - 2) for shape, programs in steps)
    return COMPILER_BYTES + len(functions) * FUNCTION_BYTES + parts * LAYER_PROGRAM_PART_BYTES
