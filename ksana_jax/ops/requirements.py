"""Requirements on an implementation of paged attention. Knows a model, its pool and a device; no kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ksana_jax.core import patterns
from ksana_jax.core.config import ModelConfig
from ksana_jax.devices.platforms import platform_of
from ksana_jax.kv.eviction.base import EvictionMethod
from ksana_jax.kv.layout import EXACT, KVLayout


class Requirements(NamedTuple):
    """Hardware, shapes and patterns that an implementation must support.

    platform: "cpu", "gpu", "tpu" or a plugin's, see `platform_of`. compute_capability: of an NVIDIA GPU, (9, 0) for
      Hopper; None elsewhere.
    dtype: NumPy's name of the stored type of keys and values. codec: how they are encoded in it, see
      `KVLayout`. query_dtype: NumPy's name of the queries' type; None where it is dtype.
    num_repositioned_sinks: maximum number of repositioned sinks.
    soft_cap: whether scores are capped. sinks: whether heads have sink logits. alibi: whether scores have
      biases by distance.
    eviction: method that evicts tokens; None if there is none.
    sides: 2 for keys and values, 1 for latents, which are both, see `core.layer_spec.LatentSpec`.
    selects: whether kv heads read blocks of their own, see `kv.selection`.
    pattern_fields: the numbers of an attention pattern (`PatternArrays`). An implementation that does not read all of
      them would compute another pattern than requested.
    """

    platform: str
    compute_capability: tuple[int, int] | None
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_repositioned_sinks: int = 0
    pattern_fields: tuple[str, ...] = patterns.PatternArrays._fields
    soft_cap: bool = False
    sinks: bool = False
    codec: str = "bf16"
    query_dtype: str | None = None
    eviction: EvictionMethod | None = None
    alibi: bool = False
    selects: bool = False
    sides: int = 2

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layout: KVLayout,
        *,
        num_repositioned_sinks: int = 0,
        query_dtype: str | None = None,
        device: Any = None,
    ) -> Requirements:
        """Returns the requirements of a model and its pool on a device, by default jax's first one."""
        device = device or jax.local_devices()[0]
        found = getattr(device, "compute_capability", None)
        heads = layout.num_kv_heads  # of one call: one, where the heads of a layer have patterns of their own
        mixed = any(leaf.name == EXACT for leaf in layout.leaves)
        return cls(
            platform_of(device),
            None if found is None else _version(found),
            layout.leaf("kv").dtype,
            config.num_heads * heads // config.num_kv_heads,
            heads,
            config.head_dim,
            layout.block_size,
            num_repositioned_sinks,
            patterns.PatternArrays._fields,
            config.soft_cap is not None,
            config.sinks is not None,
            f"{layout.codec} next to full precision" if mixed else layout.codec,
            query_dtype,
            None if layout.eviction is None else layout.eviction.method,
            config.alibi is not None,
            layout.selection is not None,
            layout.num_sides,
        )


def _version(compute_capability: str) -> tuple[int, int]:
    major, minor = compute_capability.split(".")
    return int(major), int(minor)
