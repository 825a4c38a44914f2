"""The kernels of each kind of GPU. Importing it imports Pallas."""

from __future__ import annotations

import jax

from ksana_jax.ops.kernels import Kernels
from pallas_kernels.registry import KERNELS, KV_WRITES

HOPPER = Kernels(
    KERNELS["hopper_decode"],
    KERNELS["hopper_decode"],
    KERNELS["hopper_prefill"],
    KV_WRITES["hopper_kv_write"],
    # Later versions of jax find no layouts for the packed queries of 8 kv heads with 4 query heads each.
    query_rows=8 if jax.__version_info__ < (0, 11) else 0,
)
# Make their work list in each layer.
TRITON = Kernels(KERNELS["triton_decode"], KERNELS["triton_ragged"])
