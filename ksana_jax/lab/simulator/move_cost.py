"""Cost of moving KV blocks between tiers: bytes at a rate, and a fixed time. NumPy and scipy; no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TransferLink:
    """Seconds to move bytes one way: fixed_s, and the bytes at bytes_per_s; None if they take no time."""

    fixed_s: float = 0.0
    bytes_per_s: float | None = None

    def __post_init__(self):
        checks.require(
            checks.number("fixed_s", self.fixed_s, 0),
            checks.number("bytes_per_s", self.bytes_per_s, above=0, optional=True),
            error=ConfigError,
        )

    def seconds(self, num_bytes: int) -> float:
        if not num_bytes:
            return 0.0
        return self.fixed_s + (num_bytes / self.bytes_per_s if self.bytes_per_s is not None else 0.0)


_FREE = TransferLink()


@dataclasses.dataclass(frozen=True)
class MoveCost:
    """Links between the tiers of KV blocks.

    saved, copied, loaded: from the device to the host, on the device, and from the host; all blocks of a step together,
    before it is computed.
    written, read: from the host to the disk and back; block by block, one after the other, while steps are computed.
    """

    saved: TransferLink = _FREE
    copied: TransferLink = _FREE
    loaded: TransferLink = _FREE
    written: TransferLink = _FREE
    read: TransferLink = _FREE

    def seconds(self, block_bytes: int, num_saved: int, num_copied: int, num_loaded: int) -> float:
        """Returns the seconds of a step's moves."""
        pairs = ((self.saved, num_saved), (self.copied, num_copied), (self.loaded, num_loaded))
        return sum(link.seconds(count * block_bytes) for link, count in pairs)


WAYS = tuple(field.name for field in dataclasses.fields(MoveCost))


def read_moves(given: Any) -> MoveCost:
    """Reads {"saved": {"fixed_s": 1e-5, "bytes_per_s": 4e10}, ...}.

    Raises:
      ConfigError: it has another form, an unknown key, or a number out of range; the message names it.
    """
    found = {}
    for way, link in mapping_of("cost: move", given, WAYS).items():
        fields = mapping_of(f"cost: move.{way}", link, ("fixed_s", "bytes_per_s"))
        try:
            found[way] = TransferLink(**fields)
        except ConfigError as error:
            raise ConfigError(f"cost: move.{way}: {error}") from None
    return MoveCost(**found)


def mapping_of(name: str, given: Any, keys: Sequence[str]) -> Mapping[str, Any]:
    """Returns the value of a name, which must be a mapping of some of the keys.

    Raises:
      ConfigError: it is something else, or has another key.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} is {checks.shown(given)}, must be a mapping of {', '.join(keys)}")
    if unknown := sorted(given.keys() - set(keys)):
        raise ConfigError(f"{name} has {unknown[0]!r}, must be of {', '.join(keys)}")
    return given


def fit_moves(measured: Sequence[Mapping[str, Any]]) -> MoveCost:
    """Fits links to measured moves, by least squares on relative errors; none of the two numbers is negative.

    Args:
      measured: {"way": one of WAYS, "num_bytes": ..., "seconds": ...} each.
    """
    from scipy.optimize import nnls

    found = {}
    for way in WAYS:
        pairs = np.array([(m["num_bytes"], m["seconds"]) for m in measured if m["way"] == way], float)
        if not len(pairs):
            continue
        num_bytes, seconds = pairs.T
        scale = num_bytes.max()
        x = np.stack([np.ones_like(num_bytes), num_bytes / scale], axis=1) / seconds[:, None]
        (fixed_s, slope), _ = nnls(x, np.ones(len(x)))
        found[way] = TransferLink(float(fixed_s), float(scale / slope) if slope else None)
    return MoveCost(**found)
