"""Options of the loopback plugin. Knows no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.units import GIB


@dataclasses.dataclass(frozen=True)
class LoopbackOptions:
    """Configures the loopback plugin: its devices, and what to withhold so that it plays a device that lacks it.

    Args:
      num_devices: number of devices.
      memory_bytes: memory of each device. Arrays and steps beyond it are refused with RESOURCE_EXHAUSTED.
      pinned_host: whether devices also have a memory "pinned_host".
      lacks: names of functions of the PJRT C API that answer UNIMPLEMENTED, such as "Executable_GetCostAnalysis";
        "donation" ignores that arguments are donated.
      lacks_operations: operations that no program may have: "scatter" or "stablehlo.scatter", and "dynamic while" for
        loops whose number of turns is not a constant of the program.
      stablehlo: version of StableHLO in which programs are asked for, such as "1.0.0"; empty for jax's choice.
    """

    num_devices: int = 1
    memory_bytes: int = 16 * GIB
    pinned_host: bool = False
    lacks: tuple[str, ...] = ()
    lacks_operations: tuple[str, ...] = ()
    stablehlo: str = ""

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> LoopbackOptions:
        """Reads options as they are written in YAML; lists may also be texts with commas, as in the PJRT C API.

        Raises:
          ConfigError: an option is unknown, or its value cannot be.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(f"the loopback plugin has no option {unknown[0]!r}; it has {', '.join(known)}")
        values: dict[str, Any] = dict(given)
        for name in ("lacks", "lacks_operations"):
            if name in values:
                values[name] = _names(values[name])
        return cls(**values)

    def __post_init__(self):
        checks.require(
            checks.integer("num_devices", self.num_devices, 1, 64),
            checks.integer("memory_bytes", self.memory_bytes, 1, 2**62),
            error=ConfigError,
        )
        from ksana_jax.devices.loopback import abi

        if unknown := [name for name in self.lacks if name not in (*abi.ARGUMENTS, "donation")]:
            raise ConfigError(
                f"lacks has {unknown[0]!r}, which is no function of the PJRT C API {abi.MAJOR}.{abi.MINOR}"
            )
        parts = self.stablehlo.split(".") if self.stablehlo else ["0"] * 3
        if len(parts) != 3 or not all(part.isdecimal() for part in parts):
            raise ConfigError(f"stablehlo is {self.stablehlo!r}, must be a version such as 1.0.0")
        object.__setattr__(self, "pinned_host", bool(self.pinned_host))


def _names(given: Any) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{given!r:.80} is not a list of names")
    return tuple(name.strip() for name in names if name.strip())
