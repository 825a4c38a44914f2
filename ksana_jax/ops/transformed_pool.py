"""The paged pool of a codec that stores vectors transformed, read as they are stored."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from ksana_jax.kv.codecs.base import TransformedCodec
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.kv.layout import EXACT
from ksana_jax.ops.pool import KVCache


@flax.struct.dataclass
class TransformedCache(KVCache):
    """A pool with a `TransformedCodec`, of which vectors are read as they are stored."""

    @property
    def transformed(self) -> TransformedCodec:
        codec = find_codec(self.codec)
        assert isinstance(codec, TransformedCodec)
        return codec

    def decoded(self, parts: dict[str, jax.Array]) -> jax.Array:
        return self.transformed.stored.decode(parts, jnp)


def as_stored(cache: KVCache) -> KVCache:
    """Returns a pool of which vectors are read as they are stored, if it stores all of them transformed."""
    if type(cache) is not KVCache or EXACT in cache.leaves:
        return cache
    is_transformed = isinstance(find_codec(cache.codec), TransformedCodec)
    return TransformedCache(cache.leaves, cache.codec) if is_transformed else cache
