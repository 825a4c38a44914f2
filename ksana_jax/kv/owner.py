"""Describes the owner of a block, for inspection. No jax."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ksana_jax.kv.state import Origin


class Owner(NamedTuple):
    """One owner of some blocks of a tier.

    request_id, index: as in `Sequence`; request_id is empty if the owner is a move or a read instead of a request.
    doing: "runs", "waits" (with shared or swapped blocks), "reads" from disk, "moves".
    tier: DEVICE or HOST.
    ids, starts: [n] blocks and the cache positions where they begin; starts is None if only their nodes know.
    num_tokens: cached tokens of the sequence, [n] in each block's group of layers. origins: [n]. Both may be one
      value for all.
    """

    request_id: str
    index: int
    doing: str
    tier: int
    ids: np.ndarray
    starts: np.ndarray | None = None
    num_tokens: np.ndarray | int = 0
    origins: np.ndarray | Origin | None = None

    @property
    def label(self) -> str:
        name = f"{self.request_id}/{self.index}" if self.request_id else "(no request)"
        return name if self.doing == "runs" else f"{name} {self.doing}"
