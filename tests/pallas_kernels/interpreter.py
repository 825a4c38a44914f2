"""jax's interpreter of GPU kernels with race detection, the same for all versions of jax."""

from __future__ import annotations

import contextlib
import os
import threading
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public since jax 0.11
from jax._src.state.types import TransposeTransform

PARAMS = InterpretGPUParams(detect_races=True)

# XLA:CPU has a thread for each processor, or NPROC of them, which it reads once, when jax starts its backend.
several_warpgroups = pytest.mark.skipif(
    int(os.environ.get("NPROC", os.cpu_count() or 1)) < 4,
    reason="the interpreter holds a thread of XLA:CPU for each warpgroup and may wait for ever; NPROC=4 is enough",
)


@contextlib.contextmanager
def interpreting():
    """Where kernels run with interpret=PARAMS; afresh after a failure.

    Raises:
      AssertionError: two threads or copies used the same memory without order.
    """
    try:
        with contextlib.ExitStack() as stack:
            if jax.__version_info__ < (0, 11):
                _complete(stack)
            yield
    except Exception:
        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    found = gpu_callbacks._races  # None where nothing was interpreted yet
    assert found is None or not found.races_found, "a race"


class _Numpy(threading.local):
    """NumPy, but that matmul transposes its second operand where asked to."""

    transposes = False

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, dtype):
        return np.matmul(a, b.T if self.transposes else b, dtype=dtype)


def _complete(stack: contextlib.ExitStack) -> None:
    """Adds what the interpreter of jax 0.10 does not know: transposed second operands of wgmma, and plgpu.load."""
    wgmma, numpy = gpu_callbacks.wgmma, _Numpy()

    def transposing(*, b_transforms, **kwargs):
        kept = tuple(t for t in b_transforms if not isinstance(t, TransposeTransform))
        numpy.transposes = len(kept) < len(b_transforms)
        return wgmma(b_transforms=kept, **kwargs)

    stack.enter_context(mock.patch.multiple(gpu_callbacks, np=numpy, wgmma=transposing))
    stack.enter_context(mock.patch.object(plgpu, "load", lambda ref, index, optimized: ref[index]))
