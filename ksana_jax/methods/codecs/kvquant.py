"""KVQuant's storage: keys per channel before the rotation, outliers exactly, and the first token of a text."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

from ksana_jax.methods.codecs.gear import Gear


@dataclasses.dataclass(frozen=True)
class KVQuant(Gear):
    """Stores keys before the rotation, which mixes a channel with another one by an angle that grows with the
    position, so that the range of a channel is smaller; they are rotated when they are read. 1 % of the numbers of each
    vector are outliers, which are stored exactly.

    Levels are uniform between a block's smallest and largest numbers, where the paper fits levels and thresholds of
    keys to calibration data: no calibration is needed, and every block has its own levels.

    Source: arXiv:2401.18079, sections 3.1 to 3.5, without non-uniform levels and normalisation of the codes.
    """

    outliers: float = 0.01
    rank: int = 0

    residual: ClassVar[int] = 0
    first: ClassVar[int] = 1
    unrotated_keys: ClassVar[bool] = True


kvquant4, kvquant3, kvquant2 = (functools.partial(KVQuant, bits=bits) for bits in (4, 3, 2))
