"""KVQuant's storage: keys per channel before the rotation, outliers exactly, and the first token of a sequence."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.statistics import read_statistics
from ksana_jax.methods.codecs.gear import Gear


@dataclasses.dataclass(frozen=True)
class KVQuant(Gear):
    """Stores keys before the rotation, which mixes a channel with another one by an angle that grows with the
    position, so that the range of a channel is smaller; they are rotated when they are read. 1 % of the numbers of each
    vector are outliers, which are stored exactly.

    Levels are uniform between a block's smallest and largest numbers, or as `ksana calibrate` has fitted them between
    these: one set for the keys and one for the values of all layers. The paper fits one for each layer, which gains at
    most 0.2 % of squared error on SmolLM2-135M, weighed by sensitivity, and thresholds of keys for the whole sequence.

    Args:
      statistics: file of `ksana calibrate --for kvquant`; None takes uniform levels.

    Source: arXiv:2401.18079, sections 3.1 to 3.5, without normalisation of the codes.
    """

    outliers: float = 0.01
    rank: int = 0
    statistics: str | None = None

    residual: ClassVar[int] = 0
    first: ClassVar[int] = 1
    unrotated_keys: ClassVar[bool] = True

    @property
    def _levels(self) -> np.ndarray | None:
        if self.statistics is None:
            return None
        arrays, name = read_statistics(self.statistics, "kvquant").arrays, f"{self.side}{self.bits}"
        if name not in arrays:
            raise ConfigError(
                f"kv_cache_dtype kvquant: {self.statistics} has levels of 4, 3 and 2 bits, not {self.bits}"
            )
        return arrays[name]


kvquant4, kvquant3, kvquant2 = (functools.partial(KVQuant, bits=bits) for bits in (4, 3, 2))
