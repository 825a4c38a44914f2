"""Codecs of packed codes, as kernels read them: levels, and a rotation of queries and results."""

from __future__ import annotations

import numpy as np

from ksana_jax.kv.codecs.base import Codec, TransformedCodec
from ksana_jax.kv.codecs.registry import find_codec
from ksana_jax.methods.codecs.packed import Packed
from ksana_jax.methods.codecs.turboquant import LloydMax, lloyd_max

NAMES = tuple(f"{codec}{bits}" for codec in ("int", "hadamard", "turboquant") for bits in (4, 3, 2))


def levels(name: str) -> np.ndarray:
    """Returns the numbers [2^bits] of a codec's codes, in units of their scale, in float32."""
    codec = find_codec(name)
    stored: Codec = codec.stored if isinstance(codec, TransformedCodec) else codec
    assert isinstance(stored, Packed | LloydMax)
    return lloyd_max(stored.bits) if isinstance(stored, LloydMax) else np.arange(2**stored.bits, dtype=np.float32)


def rotation(name: str) -> TransformedCodec | None:
    """Returns the codec by whose matrix queries and results are multiplied, or None."""
    codec = find_codec(name)
    return codec if isinstance(codec, TransformedCodec) else None
