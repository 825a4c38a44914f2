"""Digest of everything that determines KV values. Engines with equal digests can share cached blocks."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.params import Params


def fingerprint(
    config: ModelConfig,
    weights: str,
    *,
    dtype: str,
    quantization: str | None,
    kv_dtype: str,
    max_model_len: int,
    numerics: str = "fast",
) -> str:
    """Returns a hex digest of the model's config, its weights, and all else that determines KV values.

    A layer's input depends on cache reads of lower layers, so the storage format of keys and values counts too.
    Attention patterns are not included; see `kv.prefix_index`. With invariant numerics, bits count: also what compiled
    the functions that give them. The number of devices is not included either: they hold the same numbers.

    Args:
      weights: digest of every weight: of the files that they are read from, or `digest_of_params`.
    """
    digest = hashlib.sha256(f"{config} {config.kept} {weights} {dtype} {quantization} {kv_dtype}".encode())
    if any(
        layer.attention.rope.kind in ("dynamic", "longrope") for layer in config.layers
    ):  # stretched by the longest text
        digest.update(b"%d" % max_model_len)
    if numerics == "invariant":
        from ksana_jax.native.build import library

        digest.update(f"{numerics} {library().stem} {jax.__version__}".encode())
    return digest.hexdigest()[:32]


def digest_of_params(params: Params) -> str:
    """Returns a hex digest of every number of weights in memory.

    A core hashes 2.1 GB/s with SHA instructions, about 0.4 GB/s without.
    Of weights that several processes divide, it is that of this process's parts.
    """

    def of(named: tuple[Any, Any]) -> bytes:
        path, leaf = named
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            leaf = np.stack([shard.data for shard in leaf.addressable_shards])
        values = np.ascontiguousarray(leaf)
        digest = hashlib.sha256(f"{jax.tree_util.keystr(path)} {values.shape} {values.dtype}".encode())
        digest.update(values.reshape(-1).view(np.uint8).data)
        return digest.digest()

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(of, jax.tree.leaves_with_path(params)))).hexdigest()[:32]
