"""Bytes of weights, from a model's shape; `kv.layout` has the bytes of keys and values."""

from __future__ import annotations

import functools
import math

import jax

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.dtypes import DTYPE_BYTES
from ksana_jax.loading.load import abstract_params
from ksana_jax.models.params import param_shapes
from ksana_jax.ops.weight_packing import packed


@functools.lru_cache(maxsize=256)  # a plan asks for the same weights at every window that it tries
def weights_bytes(
    config: ModelConfig,
    dtype: str,
    embedding_device: str = "device",
    quantization: str | None = None,
    *,
    packs: bool = False,
    num_devices: int = 1,
) -> int:
    """Returns the bytes of all weights on the device; tied embeddings count once.

    Args:
      embedding_device: "host" excludes the token embedding. quantization: as in `EngineConfig`.
      packs: matrices are packed, which fills them up to a multiple of 64 rows; on several devices, those in blocks.
      num_devices: that divide the whole model; config is the part of one of them.

    Raises:
      ConfigError: the dtype is unknown.
    """
    on_host = embedding_bytes(config, dtype) if embedding_device == "host" else 0
    params = abstract_params(config, dtype, quantization)
    leaves = jax.tree.leaves(packed(params, config, only_blocks=num_devices > 1) if packs else params)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) - on_host


def embedding_bytes(config: ModelConfig, dtype: str) -> int:
    """Returns the bytes of the token embedding [V, D]."""
    return math.prod(param_shapes(config).embed) * _bytes_of(dtype)


def _bytes_of(dtype: str) -> int:
    checks.require(checks.one_of("dtype", dtype, DTYPE_BYTES), error=ConfigError)
    return DTYPE_BYTES[dtype]
