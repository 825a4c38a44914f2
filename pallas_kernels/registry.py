"""All kernels by name; each has the contract of `contract` and is tested against a reference."""

from __future__ import annotations

import jax

from pallas_kernels.contract import Kernel, Result, Written
from pallas_kernels.hopper import decode as hopper_decode
from pallas_kernels.hopper import kv_write as hopper_kv_write
from pallas_kernels.hopper import latent as hopper_latent
from pallas_kernels.hopper import prefill as hopper_prefill
from pallas_kernels.hopper import product as hopper_product
from pallas_kernels.triton import decode as triton_decode
from pallas_kernels.triton import ragged as triton_ragged

# Attention, tested against `reference`.
KERNELS: dict[str, Kernel[Result]] = {
    "hopper_decode": hopper_decode.KERNEL,
    "hopper_latent": hopper_latent.KERNEL,
    "hopper_prefill": hopper_prefill.KERNEL,
    "triton_decode": triton_decode.KERNEL,
    "triton_ragged": triton_ragged.KERNEL,
}
# Writes of keys and values, tested against `kv_write_reference`.
KV_WRITES: dict[str, Kernel[Written]] = {
    "hopper_kv_write": hopper_kv_write.KERNEL,
}
# Products of few rows with a matrix, tested against `product_reference`.
PRODUCTS: dict[str, Kernel[jax.Array]] = {
    "hopper_product": hopper_product.KERNEL,
}
