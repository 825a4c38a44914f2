"""Published rates of devices: operations and bytes of memory per second. Knows no models; no jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device's published numbers.

    flops_per_s: by dtype of weights, dense; float32 in the precision in which jax multiplies it by default.
    bytes_per_s: of its memory.
    """

    name: str
    flops_per_s: dict[str, float]
    bytes_per_s: float


# NVIDIA's data sheets of H200, H100 and A100 (SXM, without sparsity; float32 as TF32); Google Cloud's page on TPU v5e.
CHIPS = {
    "h200": Chip("NVIDIA H200", {"bf16": 989.5e12, "f16": 989.5e12, "f32": 494.5e12}, 4.8e12),
    "h100": Chip("NVIDIA H100", {"bf16": 989.5e12, "f16": 989.5e12, "f32": 494.5e12}, 3.35e12),
    "a100": Chip("NVIDIA A100 80GB", {"bf16": 312e12, "f16": 312e12, "f32": 156e12}, 2.039e12),
    "v5e": Chip("TPU v5e", {"bf16": 197e12, "f32": 197e12}, 819e9),
}
