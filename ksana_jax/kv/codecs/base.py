"""Protocols of codecs: of one token's vector in one head, or of a whole block of one head. No pools, no jax.

The formulas take an array namespace, `numpy` or `jax.numpy`, as in `patterns`: the compiled step and the tests run the
same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

import ml_dtypes  # noqa: F401  registers "bfloat16" and the float8 types with NumPy
import numpy as np


class Codec(Protocol):
    """Encodes each key vector and each value vector separately, once, when it is written.

    Every query reads stored numbers, even of its own step: results do not depend on the size of chunks.
    """

    def arrays(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the arrays that hold a vector: by name, shape and NumPy's name of the dtype.

        The codes are called "kv". Each array becomes a leaf of the pool, see `kv.layout`.
        """
        ...

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        """Returns the arrays, `[..., *shape]` each, that hold vectors x [..., H].

        Args:
          xp: array namespace, `numpy` or `jax.numpy`.
        """
        ...

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        """Decodes arrays to vectors [..., H] in a float type. Integers may hold the bits of a float
        type, see `numbers`."""
        ...


@dataclasses.dataclass(frozen=True)
class TransformedCodec:
    """Stores products of vectors with an orthogonal matrix. Base of all codecs that do, with the methods of `Codec`.

    Attention reads the products: it multiplies its queries too, and its result by the inverse, since neither products
    of vectors nor their weighted sums depend on the axes.

    Args:
      stored: codec of the products.
    """

    stored: Codec

    def transform(self, x: Any, xp: Any) -> Any:
        """Returns the products of vectors [..., H], in float32."""
        raise NotImplementedError

    def inverse(self, x: Any, xp: Any) -> Any:
        """Returns the vectors [..., H] whose products `transform` returns, in float32."""
        raise NotImplementedError

    def arrays(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return self.stored.arrays(head_dim)

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        return self.stored.encode(self.transform(x, xp), xp)

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        return self.inverse(self.stored.decode(stored, xp), xp)


@dataclasses.dataclass(frozen=True)
class BlockCodec:
    """Encodes the keys, or the values, of one kv head in a whole block. Base of all block codecs.

    A block is encoded once, from the exact numbers, by the step that computes its last token. Queries read old enough
    tokens as codes, see `sealing.Sealing`, and the others as exact numbers. Fields other than `side` are
    settings of `kv_cache_dtype`.

    Args:
      side: "k" encodes keys, "v" values.
    """

    side: Literal["k", "v"]

    # Defaults of the settings that keys and values share: see `sealing.Sealing`.
    residual: ClassVar[int] = 128
    first: ClassVar[int] = 0
    # True if keys are stored before the rotation, and rotated when they are read.
    unrotated_keys: ClassVar[bool] = False

    def arrays(self, block_size: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the arrays that hold a block of one head: by name, shape and NumPy's name of the dtype."""
        raise NotImplementedError

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        """Returns the arrays, `[..., *shape]` each, that hold blocks x [..., B, H] in float32.

        Args:
          xp: array namespace, `numpy` or `jax.numpy`.
        """
        raise NotImplementedError

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        """Returns the blocks [..., B, H] that arrays hold, in float32."""
        raise NotImplementedError


def numbers(x: Any, dtype: str, xp: Any) -> Any:
    """Returns numbers of a float type; where x holds their bits, as unsigned integers, in float32."""
    if np.dtype(x.dtype).kind != "u":
        return x
    if dtype == "bfloat16":
        # A shift widens bfloat16 to float32; XLA:CPU multiplies float32 faster than small bfloat16 batches.
        return (x.astype(xp.uint32) << 16).view(xp.float32)
    return x.view(dtype).astype(xp.float32)
