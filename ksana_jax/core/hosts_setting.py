"""The setting `distributed`: the processes that run an engine together, and this one's number. Knows no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest

AUTO, SPMD = "auto", "spmd"
MAX_PROCESSES = 1024


@dataclasses.dataclass(frozen=True)
class HostsSetting:
    """Names the processes that run an engine together; names as in `jax.distributed.initialize`.

    Args:
      coordinator_address: "host:port" of process 0, which listens there, on that address alone.
      num_processes: of the job, at least 2; usually one on each host.
      process_id: of this one, in [0, num_processes).
      initialization_timeout: seconds to wait for the other processes.
      spmd: every process makes the same calls; otherwise process 0 makes them, and the others compute its steps.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    initialization_timeout: float = 300.0
    spmd: bool = False

    @classmethod
    def read(cls, given: Any) -> HostsSetting | str | None:
        """Reads the setting: a mapping with the fields above, "auto" or "spmd" for the processes of jax.distributed or
        of a launcher that jax knows, such as Slurm or Open MPI, or None for one process.

        Raises:
          ConfigError: a field is unknown or missing, or a value cannot be.
        """
        if given is None or given in (AUTO, SPMD):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"distributed is {given!r:.80}, must be auto, spmd or a mapping with coordinator_address")
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in given if name not in known]:
            close = nearest(str(unknown[0]), known, cutoff=0.0)
            raise ConfigError(f"distributed has no field {unknown[0]!r}; the nearest is {close!r}")
        if missing := [name for name in known[:3] if given.get(name) is None]:
            raise ConfigError(f"distributed has no {', '.join(missing)}: {dict(given)!r:.80}")
        return cls(**given)

    def __post_init__(self):
        checks.require(
            checks.integer("distributed.num_processes", self.num_processes, 2, MAX_PROCESSES),
            checks.integer("distributed.process_id", self.process_id, 0),
            checks.boolean("distributed.spmd", self.spmd),
            checks.number("distributed.initialization_timeout", self.initialization_timeout, above=0),
            error=ConfigError,
        )
        if self.process_id >= self.num_processes:
            raise ConfigError(
                f"distributed.process_id is {self.process_id}, must be below num_processes {self.num_processes}"
            )
        host, _, port = str(self.coordinator_address).rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"distributed.coordinator_address is {self.coordinator_address!r:.80}, must be HOST:PORT of process 0"
            )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of process 0."""
        host, _, port = self.coordinator_address.rpartition(":")
        return host.strip("[]"), int(port)


def canonical_distributed(given: Any) -> Any:
    """Returns one spelling of each value of the setting.

    Raises:
      ConfigError: it is wrong.
    """
    found = HostsSetting.read(given)
    return dataclasses.asdict(found) if isinstance(found, HostsSetting) else found
