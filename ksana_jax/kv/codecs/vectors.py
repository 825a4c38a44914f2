"""A codec of single vectors as a block codec: keys and values apart, first tokens exact."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from ksana_jax.kv.codecs.base import BlockCodec, Codec


@dataclasses.dataclass(frozen=True)
class Vectors(BlockCodec):
    """Encodes each vector of a block with `codec`. By default no newest tokens are exact but an unfinished block's."""

    codec: ClassVar[Codec]
    residual: ClassVar[int] = 0

    def arrays(self, block_size: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: ((block_size, *shape), dtype) for name, (shape, dtype) in self.codec.arrays(head_dim).items()}

    def encode(self, x: Any, xp: Any) -> dict[str, Any]:
        return self.codec.encode(x, xp)

    def decode(self, stored: Mapping[str, Any], xp: Any) -> Any:
        return self.codec.decode(stored, xp).astype(xp.float32)


@functools.cache
def of_vectors(codec: Codec) -> type[Vectors]:
    """Returns the block codec that encodes each vector with a codec."""
    return type("Vectors", (Vectors,), {"codec": codec})
