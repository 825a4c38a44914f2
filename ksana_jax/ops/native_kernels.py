"""The kernel of CPUs, in C++."""

from __future__ import annotations

from ksana_jax.native.callers import why_not_called
from ksana_jax.native.kernel import KERNEL
from ksana_jax.ops import code_levels
from ksana_jax.ops.kernel_limits import lacks
from ksana_jax.ops.kernels import Kernels
from ksana_jax.ops.requirements import Requirements

NATIVE = Kernels(KERNEL, KERNEL)
CODECS = ("f32", "bf16", "f16", "int8", "latent8")


def unsupported(needs: Requirements) -> str | None:
    """Returns an unsupported requirement, or why the kernel cannot be compiled here, or None."""
    if needs.codec not in (*CODECS, *code_levels.NAMES):
        reads = ", ".join((*CODECS, *code_levels.NAMES))
        return f"keys and values are stored as {needs.codec}; the native kernel reads {reads}"
    if needs.query_dtype is None:
        needs = needs._replace(query_dtype={"uint16": "bfloat16"}.get(needs.dtype, needs.dtype))
    return why_not_called(needs.platform) or lacks(NATIVE, needs)
