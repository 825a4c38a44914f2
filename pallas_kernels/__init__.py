"""Pallas kernels: a small library of its own. Plain arrays in, plain arrays out; imports only jax.

Nothing here knows requests, blocks' owners or models, so that a kernel can be taken out, tested and timed alone. The
engine reaches kernels through `ksana_jax.ops` only, where each stands beside a reference that it must equal.

`reference.ragged_paged_attention` is the contract; every implementation in IMPLEMENTATIONS has its signature, keywords
of its own apart, and raises NotImplementedError for what it lacks. README.md has the list of kernels and their figures.
"""

from collections.abc import Callable

from pallas_kernels import hopper, hopper_prefill, triton_decode, triton_ragged

IMPLEMENTATIONS: dict[str, Callable] = {
    "hopper": hopper.ragged_paged_attention,
    "hopper_prefill": hopper_prefill.ragged_paged_attention,
    "triton_decode": triton_decode.ragged_paged_attention,
    "triton_ragged": triton_ragged.ragged_paged_attention,
}
