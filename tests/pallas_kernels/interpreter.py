"""jax's interpreter of GPU kernels with race detection, the same for all versions of jax."""

from __future__ import annotations

import contextlib
import os

import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public since jax 0.11

from ksana_jax.core.processor import num_cores

PARAMS = InterpretGPUParams(detect_races=True)

# XLA:CPU has a thread for each processor, or NPROC of them, which it reads once, when jax starts its backend.
several_warpgroups = pytest.mark.skipif(
    int(os.environ.get("NPROC", num_cores())) < 4,
    reason="the interpreter holds a thread of XLA:CPU for each warpgroup and may wait for ever; NPROC=4 is enough",
)


@contextlib.contextmanager
def interpreting():
    """Where kernels run with interpret=PARAMS; afresh after a failure.

    Raises:
      AssertionError: two threads or copies used the same memory without order.
    """
    try:
        yield
    except Exception:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    found = gpu_callbacks._races  # None where nothing was interpreted yet
    assert found is None or not found.races_found, "a race"
