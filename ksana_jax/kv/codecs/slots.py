"""Slots of a pool that hold several tokens each, in a codec of fewer bits than the pool's. Knows bytes; no jax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.codecs.base import Codec
from ksana_jax.kv.codecs.registry import find_codec


@dataclasses.dataclass(frozen=True)
class SlotCodec:
    """Stores up to `per_slot` keys, or values, in the bytes of one vector of the leaf "kv".

    Args:
      codec: of each key and value.
      slot_bytes: bytes of a vector of the leaf.
    """

    codec: Codec
    head_dim: int
    slot_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a key or a value."""
        arrays = self.codec.arrays(self.head_dim).values()
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)

    @property
    def per_slot(self) -> int:
        return self.slot_bytes // self.token_bytes

    def encoded(self, x: Any, xp: Any) -> Any:
        """Returns bytes [..., token_bytes] that hold vectors x [..., H]."""
        parts = self.codec.encode(x.astype(xp.float32), xp)
        names = self.codec.arrays(self.head_dim)
        return xp.concatenate([parts[name].reshape(*x.shape[:-1], -1).view(xp.uint8) for name in names], axis=-1)

    def decoded(self, stored: Any, xp: Any) -> Any:
        """Returns the vectors [..., H], in float32, that bytes [..., token_bytes] hold."""
        parts, start = {}, 0
        for name, (shape, dtype) in self.codec.arrays(self.head_dim).items():
            end = start + math.prod(shape) * np.dtype(dtype).itemsize
            parts[name] = stored[..., start:end].view(dtype).reshape(*stored.shape[:-1], *shape)
            start = end
        return self.codec.decode(parts, xp).astype(xp.float32)

    def split(self, slots: Any, xp: Any) -> Any:
        """Returns the bytes [..., C * per_slot, token_bytes] of the tokens in vectors [..., C, W] of the leaf."""
        used = slots.view(xp.uint8)[..., : self.per_slot * self.token_bytes]
        return used.reshape(*slots.shape[:-2], -1, self.token_bytes)

    def joined(self, tokens: Any, dtype: Any, xp: Any) -> Any:
        """Returns vectors [..., C, W] of the leaf, of a dtype, that hold bytes [..., C * per_slot, token_bytes]."""
        used = tokens.reshape(*tokens.shape[:-2], -1, self.per_slot * self.token_bytes)
        padding = [(0, 0)] * (used.ndim - 1) + [(0, self.slot_bytes - used.shape[-1])]
        return xp.pad(used, padding).view(dtype)


def check_slots(method: str, codec: str, head_dim: int, shape: tuple[int, ...], dtype: str) -> None:
    """Raises ConfigError if vectors of the leaf "kv" [..., W] hold less than two tokens in a method's codec."""
    found = SlotCodec(find_codec(codec), head_dim, shape[-1] * np.dtype(dtype).itemsize)
    if found.per_slot < 2:
        raise ConfigError(
            f"{method}: {head_dim} numbers take {found.token_bytes} bytes in {codec}, more than half of the "
            f"{found.slot_bytes} that they take in kv_cache_dtype"
        )
