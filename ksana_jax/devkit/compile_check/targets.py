"""Compilation targets that need no attached device: GPUs by their description."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.sharding.absent import only_compile, place_on_absent
from ksana_jax.sharding.placement import Placement
from pallas_kernels import aot


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine to compile for.

    name: of the command line. devices: given a number, as many devices of one host, which hold no arrays.
    memory_bytes: of a device. context: of lowering for one of them.
    """

    name: str
    memory_bytes: int
    devices: Callable[[int], Sequence[Any]]
    context: Callable[[], contextlib.AbstractContextManager[Any]]

    @property
    def device(self) -> Any:
        """One of its devices."""
        return self.devices(1)[0]

    @property
    def platform(self) -> str:
        """jax's name for the kind of device."""
        return self.device.platform

    def placement(self, num_devices: int = 1) -> Placement:
        """Returns the placement of an engine on as many of its devices."""
        return place_on_absent(self.devices(num_devices))

    def described(self, num_devices: int = 1) -> contextlib.AbstractContextManager[Any]:
        """Returns a context where jax lowers for num_devices of the target; several are described by their mesh."""
        return self.context() if num_devices == 1 else contextlib.nullcontext()


def check_target(name: str) -> None:
    """Checks that a target is known, and that its compiler is installed.

    Raises:
      ConfigError: it is not; the message says what to install.
    """
    if name not in aot.targets():
        raise ConfigError(f"unknown target {name!r}; there are {', '.join(aot.targets())}")
    if line := aot.missing():
        raise ConfigError(line)


def find_target(name: str) -> Target:
    """Returns a target whose compiler is installed; see `check_target`. jax then uses the CPU only."""
    check_target(name)
    only_compile()
    return gpu_target(aot.target(name))


def gpu_target(target: aot.Target) -> Target:
    """Returns a GPU as a target."""
    return Target(
        target.name, target.memory_bytes, lambda number: aot.devices(target, number), lambda: aot.described(target)
    )
