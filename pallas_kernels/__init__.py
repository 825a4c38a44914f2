"""Pallas kernels: a small library of its own. Plain arrays in, plain arrays out; imports only jax.

Nothing here knows requests, blocks' owners or models, so that a kernel can be taken out, tested and timed alone. The
engine reaches kernels through `ksana_jax.ops` only, where each stands beside a reference that it must equal.

`reference.ragged_paged_attention` is the contract; every implementation in IMPLEMENTATIONS has its signature, keywords
of its own apart, and raises NotImplementedError for what it lacks. README.md has the list of kernels and their figures.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    IMPLEMENTATIONS: dict[str, Callable]


def __getattr__(name: str):
    # Importing Mosaic GPU takes 0.2 s, which users of `aot` or `patterns` need not wait for.
    if name != "IMPLEMENTATIONS":
        raise AttributeError(f"module 'pallas_kernels' has no attribute {name!r}")
    modules = ("hopper.decode", "hopper.prefill", "triton.decode", "triton.ragged")
    found = {m.replace(".", "_"): importlib.import_module(f"pallas_kernels.{m}") for m in modules}
    return {name: module.ragged_paged_attention for name, module in found.items()}
