"""Memory of this process and of its device, and what jax itself takes of it on the CPU."""

from __future__ import annotations

import jax

MIB = 2**20
# What loading the compiler and the first compilation leave behind, and what each compiled step keeps per layer.
# Measured on jax 0.10.2, x86: models of 2 to 16 layers, 6 to 36 programs, with and without the cache on disk.
COMPILER_BYTES = 80 * MIB
PROGRAM_LAYER_BYTES = 3 * MIB


def resident_bytes(highest: bool = False) -> int | None:
    """Resident memory of this process, or the highest it has been; None where the system has no /proc (not Linux)."""
    field = "VmHWM:" if highest else "VmRSS:"
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
    except OSError:
        return None


def device_peak_bytes() -> int | None:
    """The most that the first device's allocator has given out; of the process, where that is the CPU."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return resident_bytes(highest=True)
    return (device.memory_stats() or {}).get("peak_bytes_in_use")


def expected_peak_bytes(taken: int, baseline: int | None, num_layers: int, num_steps: int) -> int | None:
    """What `device_peak_bytes` is expected to say.

    Args:
      taken: bytes of weights, pool and a step.
      baseline: resident memory of the process before them; only the CPU's peak has it and the compiler in it.
      num_steps: compiled steps.
    """
    if jax.default_backend() != "cpu":
        return taken
    if baseline is None:
        return None
    return baseline + COMPILER_BYTES + num_steps * num_layers * PROGRAM_LAYER_BYTES + taken
