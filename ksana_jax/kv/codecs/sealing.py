"""Applies block codecs: which tokens queries read as codes, and the bytes of a block. Knows positions; no pools.

A sequence has each token twice for a while: exact, in blocks of its residual window, and, once its block is full, in a
block of codes. Codes depend only on the block's tokens, and the tokens that a query reads only on its position, so
results do not depend on chunks, batches or preemption.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.dtypes import DTYPES
from ksana_jax.core.errors import ConfigError
from ksana_jax.kv.codecs.base import BlockCodec
from ksana_jax.kv.visible_range import VisibleRange

Arrays = dict[str, tuple[tuple[int, ...], str]]


@dataclasses.dataclass(frozen=True)
class Sealing:
    """Block codecs of keys and values, and the tokens that queries read exactly.

    Args:
      k, v: codecs of keys and values.
      residual: R: a query reads at least its newest R tokens, itself included, exactly, and at most block size - 1
        more. KIVI (arXiv:2402.02750, section 3.3) has the newest R values of T, and T mod R keys.
      first: tokens at the beginning of a text that are always read exactly (KVQuant, arXiv:2401.18079, section 3.5);
        exact blocks that hold them are kept.
      residual_dtype: dtype of the exact tokens, "f32", "bf16" or "f16"; None is the engine's.
    """

    k: BlockCodec
    v: BlockCodec
    residual: int
    first: int
    residual_dtype: str | None = None

    def __post_init__(self):
        checks.require(
            checks.integer("kv_cache_dtype residual", self.residual, 0),
            checks.integer("kv_cache_dtype first", self.first, 0),
            checks.one_of("kv_cache_dtype residual_dtype", self.residual_dtype, (None, *DTYPES)),
            error=ConfigError,
        )

    def exact_from(self, positions: Any, block_size: int, xp: Any) -> Any:
        """Returns the first token that queries at some positions read exactly, a multiple of the block size. They read
        earlier ones as codes, except the first ones of the text."""
        return block_size * (xp.maximum(positions + 1 - self.residual, 0) // block_size)

    def num_exact(self, block_size: int) -> int:
        """Returns the most newest tokens that later queries read exactly, or whose block is not full."""
        return max(self.residual, 1) + block_size - 2

    def residual_live(self, live: VisibleRange) -> VisibleRange:
        """Returns the positions that later queries of layers with some live range read exactly.

        A window of R tokens keeps the whole blocks that it touches, because queries read whole blocks.
        """
        # Block size 4, residual 6: query 8 reads tokens 0 to 8 exactly, query 9 those from 4 on, and sees 4 to 9 in a
        # window of 6. The block that is being filled is always kept, so that it can be encoded.
        window = max(self.residual, 1)
        if live.window is not None and not (live.num_sinks or live.globals_every):
            window = min(window, live.window)
        return VisibleRange(window, self.first, ())

    def _arrays(self, block_size: int, head_dim: int) -> tuple[tuple[str, Arrays], ...]:
        return tuple((side, getattr(self, side).arrays(block_size, head_dim)) for side in ("k", "v"))

    def head_bytes(self, block_size: int, head_dim: int) -> int:
        """Returns the bytes of one head's keys and values in a block of codes."""
        arrays = (array for _, side in self._arrays(block_size, head_dim) for array in side.values())
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays)

    def encoded(self, k: Any, v: Any, xp: Any) -> Any:
        """Returns bytes [..., head_bytes] that hold keys and values [..., B, H] of blocks."""
        *others, block_size, head_dim = k.shape
        pieces = []
        for x, (side, arrays) in zip((k, v), self._arrays(block_size, head_dim), strict=True):
            parts = getattr(self, side).encode(x.astype(xp.float32), xp)
            pieces += [parts[name].reshape(*others, -1).view(xp.uint8) for name in arrays]
        return xp.concatenate(pieces, axis=-1)

    def decoded(self, stored: Any, block_size: int, head_dim: int, xp: Any) -> tuple[Any, Any]:
        """Returns the keys and values [..., B, H] in float32 that bytes [..., head_bytes] hold."""
        found, start = [], 0
        for side, arrays in self._arrays(block_size, head_dim):
            parts: dict[str, Any] = {}
            for name, (shape, dtype) in arrays.items():
                end = start + math.prod(shape) * np.dtype(dtype).itemsize
                parts[name] = stored[..., start:end].view(dtype).reshape(*stored.shape[:-1], *shape)
                start = end
            found.append(getattr(self, side).decode(parts, xp))
        return found[0], found[1]


def read_sealing(setting: Mapping[str, Any], make: Any) -> Sealing:
    """Returns the block codecs of a `kv_cache_dtype` with the keys k and v.

    Args:
      setting: {"k": name, "v": name, and any of the fields of `Sealing` and of the codecs}.
      make: name -> a class, or a function with its arguments.

    Raises:
      ConfigError: a key is missing or unknown, or a value is out of range.
    """
    shared = {field.name for field in dataclasses.fields(Sealing)}
    given = {key: value for key, value in setting.items() if key not in shared}
    known: set[str] = set()
    sides: dict[str, BlockCodec] = {}
    for side in ("k", "v"):
        codec = make(setting[side])(side=side)
        if not isinstance(codec, BlockCodec):
            raise ConfigError(f"kv_cache_dtype {side!r} is {setting[side]!r:.80}, which makes no BlockCodec")
        names = {field.name for field in dataclasses.fields(codec)} - {"side"}
        sides[side] = dataclasses.replace(codec, **{name: given[name] for name in names & given.keys()})
        known |= names
    if unknown := sorted(given.keys() - known):
        names = ", ".join(sorted(known | shared))
        raise ConfigError(f"kv_cache_dtype has no setting {unknown[0]!r}: with these codecs it has {names}")
    fields: dict[str, Any] = {
        name: max(getattr(codec, name) for codec in sides.values()) for name in ("residual", "first")
    }
    fields |= {key: setting[key] for key in shared & setting.keys() - {"k", "v"}}
    return Sealing(sides["k"], sides["v"], **fields)
