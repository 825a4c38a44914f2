"""Base of eviction methods that read numbers which `ksana calibrate` measured for the model. NumPy only."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.statistics import read_statistics
from ksana_jax.kv.eviction.base import EvictionMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrated(EvictionMethod):
    """Ranks rotated keys by numbers of their layer, in `Cached.constants`.

    Args:
      statistics: file of `ksana calibrate`; None takes the one in the user's cache folder that is of the model.
    """

    statistics: str | None = None

    # Kind of the file's numbers, see `lab.calibration.KINDS`.
    calibrated_for: ClassVar[str]

    def __post_init__(self):
        super().__post_init__()
        require_rotated(self)

    def constants(self) -> dict[str, np.ndarray]:
        if self.statistics is None:
            raise ConfigError(
                f"kv_eviction {type(self).__name__}: statistics is null, must be a file for a model that has no files"
            )
        return read_statistics(self.statistics, self.calibrated_for).arrays


def require_rotated(method: EvictionMethod) -> None:
    """Checks that a method reads keys which are rotated at their sequence positions, as future queries will be."""
    if method.positions != "absolute":
        raise ConfigError(
            f"kv_eviction {type(method).__name__}: positions is {method.positions!r}, must be 'absolute': it compares "
            "rotated queries and keys"
        )
