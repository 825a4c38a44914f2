"""Memory of this process and of its device, and what jax itself takes of it on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import jax

from ksana_jax.step.contract import StepShape
from ksana_jax.units import MIB

# What the compiler leaves behind when it is first used, what each program keeps, and what a step keeps for each layer
# and part (decodes, tiles). Measured on XLA:CPU of jax 0.10.2, models of 2 to 16 layers, 6 to 36 programs; 0.12 alike.
# From run to run, and with what else the machine does, the compiler takes up to 20 MiB more or less.
# Where all programs come from the compilation cache, the compiler is never used and about 100 MiB of it are not taken.
COMPILER_BYTES = 158 * MIB
PROGRAM_BYTES = 3 * MIB
LAYER_PART_BYTES = 3 * MIB // 2


def resident_bytes(highest: bool = False) -> int | None:
    """Resident memory of this process, or the highest it has been; None where the system has no /proc (not Linux)."""
    jax.devices()  # what jax's backend takes is there from here on
    if not highest:
        return_free_memory()
    field = "VmHWM:" if highest else "VmRSS:"
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
    except OSError:
        return None


def return_free_memory() -> None:
    """Gives the system what the C library keeps of freed memory: compiling Python's sources alone leaves 40 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def device_peak_bytes() -> int | None:
    """The most that the first device's allocator has given out; of the process, where that is the CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return resident_bytes(highest=True)
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def compiled_bytes(steps: Sequence[StepShape], num_programs: int, num_layers: int) -> int:
    """What XLA:CPU keeps of programs in the process's memory.

    Args:
      steps: those that are steps of the network.
      num_programs: all of them.
    """
    parts = sum(len(step.parts) for step in steps)
    return COMPILER_BYTES + num_programs * PROGRAM_BYTES + parts * num_layers * LAYER_PART_BYTES
