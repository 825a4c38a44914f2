"""python -m experiments.gpu.profiled [--tiny] KERNEL...: launches each kernel of `KERNELS` once, for a profiler."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.gpu.candidates import implementations
from experiments.gpu.cases import Case, decode_cases
from experiments.gpu.sections.operators import kernels, llama_products
from experiments.gpu.sections.quantised import quantised
from pallas_kernels.contract import Kernel

Launch = Callable[[bool], None]


def _attention(name: str, case: Case, kind: str | None = None) -> None:
    kernel = implementations().get(name) or implementations()["reference"]
    a = case.arguments()
    pool, scales = (a.pool, None) if kind is None else quantised(a.pool, kind)
    call = a._replace(pool=pool).call(scales=scales)
    jax.block_until_ready(jax.jit(lambda call: kernel(call).out)(call))


def _decode(tiny: bool, kind: str | None = None) -> None:
    # A single layer: a profiler saves and restores all memory that a launch writes.
    case = next(c for c in decode_cases(64, tiny) if c.name in ("64x4k", "2x100"))
    _attention("hopper_decode", _Shallow(**vars(case)), kind)


def _prefill(tiny: bool) -> None:
    size = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "tiny": True} if tiny else {}
    length = 96 if tiny else 8192
    _attention("hopper_prefill", _Shallow(f"causal {length}", (length,), 64, queries=64, prefill=True, **size))


class _Shallow(Case):
    num_layers = 1  # pyright: ignore[reportAssignmentType]


def _product(tiny: bool, name: str) -> None:
    kernel: Kernel[Any] = kernels()[1]
    call = llama_products(int(np.random.default_rng().integers(2**20)), tiny, 8 if tiny else 64)[name]
    jax.block_until_ready(jax.jit(lambda call: kernel(call))(call))


# In the order in which a profiler sees them: each launches one kernel whose name begins with "hopper_", and perhaps
# a merge.
KERNELS: dict[str, Launch] = {
    **{f"decode 64x4k, {kind}": functools.partial(_decode, kind=kind) for kind in ("int8", "e4m3")},
    "decode 64x4k": _decode,
    **{f"{name}, 64 rows": functools.partial(_product, name=name) for name in ("gate and up", "qkv")},
    "prefill, causal 8k": _prefill,
}


def main(argv: list[str]) -> int:
    tiny = "--tiny" in argv
    for name in [a for a in argv if a != "--tiny"] or KERNELS:
        KERNELS[name](tiny)
        print(name, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
