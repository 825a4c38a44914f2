"""The hash chain of a prompt: the keys under which engines cache its blocks."""

from __future__ import annotations

import functools
import hashlib

import numpy as np


def hashes_of(token_ids: np.ndarray, block_size: int, salt: str = "", model: str = "") -> list[bytes]:
    """Returns a hash for each full block of a prompt; it covers all tokens up to the block's end.

    Args:
      token_ids: [T] of the rendered prompt, template included.
      block_size: tokens in a block.
      salt: requests with other salts share nothing with this one.
      model: fingerprint of the model.

    Returns:
      Keys of 32 bytes, equal to `kv.prefix_index.PrefixIndex`'s in an engine whose layers with keys and values form
      one group and whose attention pattern is full, so that the events of its cache name the same blocks.
    """
    data = np.ascontiguousarray(token_ids, np.int32).tobytes()
    length, chain, found = 4 * block_size, _root(model, salt), []
    sha256, add = hashlib.sha256, found.append
    for at in range(0, len(data) - length + 1, length):
        chain = sha256(chain + data[at : at + length]).digest()
        add(chain)
    return found


@functools.lru_cache(maxsize=1024)
def _root(model: str, salt: str) -> bytes:
    # Lengths distinguish ("a", "bc") from ("ab", "c").
    parts = b"".join(b"%d:" % len(part) + part for part in (model.encode(), salt.encode()))
    return hashlib.sha256(b"root" + parts).digest()
