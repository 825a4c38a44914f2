"""All kernels of attention by name; each keeps the contract of `contract` and is held to `reference`."""

from __future__ import annotations

from pallas_kernels.contract import Kernel
from pallas_kernels.hopper import decode as hopper_decode
from pallas_kernels.hopper import prefill as hopper_prefill
from pallas_kernels.triton import decode as triton_decode
from pallas_kernels.triton import ragged as triton_ragged

KERNELS: dict[str, Kernel] = {
    "hopper_decode": hopper_decode.KERNEL,
    "hopper_prefill": hopper_prefill.KERNEL,
    "triton_decode": triton_decode.KERNEL,
    "triton_ragged": triton_ragged.KERNEL,
}
