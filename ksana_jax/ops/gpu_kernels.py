"""The kernels of each kind of GPU. Importing it imports Pallas."""

from __future__ import annotations

from ksana_jax.ops.kernels import Kernels
from pallas_kernels.registry import KERNELS, KV_WRITES

HOPPER = Kernels(
    KERNELS["hopper_decode"],
    KERNELS["hopper_decode"],
    KERNELS["hopper_prefill"],
    KV_WRITES["hopper_kv_write"],
    KERNELS["hopper_latent"],
)
TRITON = Kernels(KERNELS["triton_decode"], KERNELS["triton_ragged"])
