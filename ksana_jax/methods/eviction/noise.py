"""Random numbers that depend on a seed and on coordinates alone, so that batches, chunks and restarts repeat them."""

from __future__ import annotations

from typing import Any

from ksana_jax.kv.eviction.base import Array


def uniform(xp: Any, seed: int, *coordinates: Array) -> Array:
    """Returns float32 numbers in (0, 1) for integer coordinates, which broadcast against each other.

    Each coordinate is mixed in with two rounds of multiply and xor-shift of 32 bits.
    """
    bits = xp.full(1, seed & 0xFFFFFFFF, xp.uint32)
    for coordinate in coordinates:
        bits = _mixed(xp, bits + xp.atleast_1d(coordinate).astype(xp.uint32) * xp.uint32(0x9E3779B9))
    return ((bits >> xp.uint32(9)).astype(xp.float32) + xp.float32(0.5)) * xp.float32(2.0**-23)


def _mixed(xp: Any, bits: Array) -> Array:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> xp.uint32(shift))) * xp.uint32(factor)
    return bits ^ (bits >> xp.uint32(16))
