"""jax's interpreter of GPU programs, for the Hopper kernels with interpret=True on the CPU: numbers, not layouts.

It holds a thread of XLA:CPU for each warpgroup and may wait for ever with fewer: NPROC=8 in the environment,
before jax starts, is enough for kernels of three. Compiled code, layouts included, runs in `tests.emulator`.
"""

from __future__ import annotations

import contextvars
import functools
import threading

import jax
import numpy as np

_interpreted = contextvars.ContextVar("interpreted", default=False)


def parameters(interpret):
    """The interpreter's parameters for a kernel's `interpret`: None for False and None; True takes jax's
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
    """True if a body is being traced for jax 0.10's interpreter, which has no plgpu.load."""
    return _interpreted.get() and jax.__version_info__ < (0, 11)


class _Numpy(threading.local):
    """NumPy, but that matmul transposes its operands where asked to."""

    transposes: tuple[bool, bool] = False, False

    def __getattr__(self, name):
        return getattr(np, name)

    def matmul(self, a, b, dtype):
        a, b = (x.T if transposed else x for x, transposed in zip((a, b), self.transposes))
        return np.matmul(a, b, dtype=dtype)


@functools.cache
def _complete() -> None:
    """Teaches the interpreter of jax 0.10 operands of wgmma that are transposed."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
    from jax._src.state.types import TransposeTransform

    wgmma, numpy = gpu_callbacks.wgmma, _Numpy()

    def transposing(*, a_transforms, b_transforms, **kwargs):
        given = a_transforms, b_transforms
        kept = [tuple(t for t in x if not isinstance(t, TransposeTransform)) for x in given]
        numpy.transposes = len(kept[0]) < len(given[0]), len(kept[1]) < len(given[1])
        return wgmma(a_transforms=kept[0], b_transforms=kept[1], **kwargs)

    gpu_callbacks.np = numpy  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]
    gpu_callbacks.wgmma = transposing
