"""The terms that follow from a model's shape alone: bytes of weights and of keys and values."""

from __future__ import annotations

import math

import jax

from ksana_jax.config import ConfigError, ModelConfig
from ksana_jax.dtypes import DTYPE_BYTES
from ksana_jax.models.transformer import is_shape, param_shapes

# A byte a number under "int8"; its scales, one to a group of numbers, are not counted.
KV_BYTES = DTYPE_BYTES | {"int8": 1}


def weights_bytes(config: ModelConfig, dtype: str, embedding_device: str = "device") -> int:
    """Bytes of all weights on the device, tied embeddings counted once.

    Args:
      embedding_device: "host" leaves out the token embedding.

    Raises:
      ConfigError: an unknown dtype.
    """
    shapes = jax.tree.leaves(param_shapes(config), is_leaf=is_shape)
    on_host = embedding_bytes(config, dtype) if embedding_device == "host" else 0
    return sum(map(math.prod, shapes)) * _bytes_of(dtype, DTYPE_BYTES, "dtype") - on_host


def embedding_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of the token embedding [V, D]."""
    return math.prod(param_shapes(config).embed) * _bytes_of(dtype, DTYPE_BYTES, "dtype")


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Bytes of keys and values of one token in all layers: 2 * L * K * H numbers."""
    return config.kv_bytes_per_token(_bytes_of(dtype, KV_BYTES, "kv_dtype"))


def _bytes_of(dtype: str, table: dict[str, int], name: str) -> int:
    if dtype not in table:
        raise ConfigError(f"{name} is {dtype!r}, must be one of {', '.join(table)}")
    return table[dtype]
