"""Topologies of TPUs that are not attached, as libtpu describes them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
from typing import Any

import jax

from ksana_jax.core.config import ConfigError

EXTRA = "aot-tpu"


@dataclasses.dataclass(frozen=True, eq=False)
class Chip:
    """A kind of TPU.

    kind: as jax calls it. memory_bytes: of one. accelerator: prefix of the names of its slices, which libtpu would
    otherwise look for on the network. hosts: chips of a host by its shape, for libtpu.
    """

    name: str
    kind: str
    memory_bytes: int
    accelerator: str
    hosts: dict[int, tuple[int, int]]

    def devices(self, number: int) -> tuple[Any, ...]:
        """Returns `number` chips of one host; they hold no arrays.

        Raises:
          ConfigError: there is no host with as many.
        """
        if number not in self.hosts:
            raise ConfigError(f"{self.kind} has hosts of {', '.join(map(str, self.hosts))} chips, not {number}")
        return _devices(self, number)

    def described(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context where jax lowers for one chip."""
        device = jax.sharding.AbstractDevice(device_kind=self.kind, num_cores=1, platform="tpu")
        return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


@functools.cache
def _devices(chip: Chip, number: int) -> tuple[Any, ...]:
    from jax.experimental import topologies

    rows, columns = chip.hosts[number]
    # Otherwise libtpu asks the network which TPU this is, and complains.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_WORKER_ID", "0")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{chip.accelerator}-{number}")
    bounds = [rows, columns, 1]
    found = topologies.get_topology_desc(f"{chip.name}:{rows}x{columns}", platform="tpu", chips_per_host_bounds=bounds)
    return tuple(found.devices)


# Google Cloud's page on TPU v5e: 16 GB a chip, hosts of 1, 4 and 8; two chips are a part of one.
TARGETS = {"v5e": Chip("v5e", "TPU v5 lite", 16 << 30, "v5litepod", {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 4)})}


def missing() -> str | None:
    """Returns the package to install for compiling for a TPU; None if nothing is missing."""
    if importlib.util.find_spec("libtpu") is not None:
        return None
    return f"compiling for a TPU needs libtpu; install the extra: pip install 'ksana-jax[{EXTRA}]'"
