"""Digest of everything that determines KV values. Engines with equal digests can share cached blocks."""

from __future__ import annotations

import hashlib

import jax

from ksana_jax.core.config import ModelConfig
from ksana_jax.models.params import Params
from ksana_jax.sharding.placement import ONE_DEVICE, Placement

# Number of elements sampled from each weight; further training changes all of them.
_SAMPLED = 4096


def fingerprint(
    config: ModelConfig,
    params: Params,
    *,
    dtype: str,
    kv_dtype: str,
    max_model_len: int,
    numerics: str = "fast",
    placement: Placement = ONE_DEVICE,
) -> str:
    """Returns a hex digest of the model's config, a sample of every weight, and all else that determines KV values.

    A layer's input depends on cache reads of lower layers, so the storage format of keys and values counts too.
    Attention patterns are not included; see `kv.prefix_index`. With invariant numerics, bits count: also what compiled
    the functions that give them. The number of devices is not included either: they hold the same numbers.

    Args:
      placement: of the weights.
    """
    digest = hashlib.sha256(f"{config} {dtype} {kv_dtype}".encode())
    if any(
        layer.attention.rope.kind in ("dynamic", "longrope") for layer in config.layers
    ):  # stretched by the longest text
        digest.update(b"%d" % max_model_len)
    if numerics == "invariant":
        from ksana_jax.native.build import library

        digest.update(f"{numerics} {library().stem} {jax.__version__}".encode())
    for path, leaf in jax.tree.flatten_with_path(params)[0]:
        shape, sample = placement.sampled(config, path, leaf, _SAMPLED)
        digest.update(f"{jax.tree_util.keystr(path)} {shape} {leaf.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:32]
