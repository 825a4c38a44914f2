"""jax's interpreter of GPU programs, for the Hopper kernels with interpret=True on the CPU: numbers, not layouts.

It holds a thread of XLA:CPU for each warpgroup and may wait for ever where there are fewer: NPROC=8 in the environment,
before jax starts, is enough for kernels of three. What is compiled, layouts and all, runs in `pallas_kernels.ptx`.
"""

from __future__ import annotations

import contextvars
import functools
import threading

import jax
import numpy as np

_interpreted = contextvars.ContextVar("interpreted", default=False)


def parameters(interpret):
    """Those of the interpreter for what a kernel was given as `interpret`: None for False and None; True takes jax's
    defaults; others are parameters already."""
    if not interpret:
        return None
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # public since jax 0.11

    if jax.__version_info__ < (0, 11):
        _complete()
    return InterpretGPUParams() if interpret is True else interpret


def interpreted(body):
    """A kernel's body, traced for the interpreter."""

    @functools.wraps(body)
    def run(*refs):
        token = _interpreted.set(True)
        try:
            return body(*refs)
        finally:
            _interpreted.reset(token)

    return run


def loads_plainly() -> bool:
    """Whether a body is being traced for an interpreter that has no plgpu.load, that of jax 0.10."""
    return _interpreted.get() and jax.__version_info__ < (0, 11)


class _Numpy(threading.local):
    """NumPy, but that matmul transposes its second operand where asked to."""

    transposes = False

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, dtype):
        return np.matmul(a, b.T if self.transposes else b, dtype=dtype)


@functools.cache
def _complete() -> None:
    """Teaches the interpreter of jax 0.10 second operands of wgmma that are transposed."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.state.types import TransposeTransform

    wgmma, numpy = gpu_callbacks.wgmma, _Numpy()

    def transposing(*, b_transforms, **kwargs):
        kept = tuple(t for t in b_transforms if not isinstance(t, TransposeTransform))
        numpy.transposes = len(kept) < len(b_transforms)
        return wgmma(b_transforms=kept, **kwargs)

    gpu_callbacks.np = numpy  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    gpu_callbacks.wgmma = transposing
