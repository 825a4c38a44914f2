"""Divides the nodes of a cluster into places, each for one process with a device of its own. Plain data; no Ray."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ksana_jax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Resources:
    """CPUs and GPUs of one process, as Ray counts them. None: see `places_of`."""

    num_cpus: float | None = None
    num_gpus: float | None = None

    def __post_init__(self):
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value}, must be a number from 0")
            if value is not None and value > 1 and value != int(value):
                raise ConfigError(f"{name} is {value}: above 1, Ray takes whole numbers")
        if self.num_cpus == 0 and not self.num_gpus:
            raise ConfigError("num_cpus is 0 without GPUs, which puts any number of processes on a node at once")


@dataclasses.dataclass(frozen=True)
class Place:
    """Room for one process on a node.

    cores: (number of the first, count) of the node's cores that the process pins itself to, where several processes
      share the node; None leaves it all cores.
    hides_gpus: the node has GPUs that the process must not use: Ray does not hide them from it.
    """

    node_id: str
    node: str
    index: int
    num_cpus: float
    num_gpus: float
    cores: tuple[int, int] | None
    hides_gpus: bool = False


def places_of(nodes: Sequence[Mapping[str, Any]], resources: Resources, num_devices: int = 1) -> list[Place]:
    """Returns the places of a cluster.

    By default, each GPU is a place, with an equal share of its node's CPUs; in a cluster without GPUs, each node is
    one, because processes that share cores slow each other down. Where a cluster has GPUs, nodes without one have no
    place, unless num_gpus is 0.

    Args:
      nodes: as `ray.nodes()` returns them.
      num_devices: GPUs of a place where `resources` does not say.

    Raises:
      ConfigError: no node that is alive has room for one place.
    """
    alive = [node for node in nodes if node["Alive"]]
    has_gpus = any(node["Resources"].get("GPU", 0) for node in alive)
    num_gpus = resources.num_gpus if resources.num_gpus is not None else num_devices if has_gpus else 0
    found = [place for node in alive for place in _places(node, resources.num_cpus, num_gpus)]
    if alive and not found:
        most = [max(node["Resources"].get(kind, 0) for node in alive) for kind in ("CPU", "GPU")]
        wanted = "any" if resources.num_cpus is None else f"{resources.num_cpus:g}"
        raise ConfigError(
            f"no node of the cluster has room for a process with num_cpus={wanted} and num_gpus={num_gpus:g}: "
            f"{len(alive)} nodes, with at most {most[0]:g} CPUs and {most[1]:g} GPUs"
        )
    return found


def _places(node: Mapping[str, Any], num_cpus: float | None, num_gpus: float) -> list[Place]:
    cpus, gpus = (node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU"))
    by_gpus = int(gpus / num_gpus) if num_gpus else None
    if num_cpus is None:
        count = by_gpus if by_gpus is not None else int(cpus >= 1)
        num_cpus = float(int(cpus / count)) if count else 0.0
    else:
        fitting = [by_gpus, int(cpus / num_cpus) if num_cpus else None]
        count = min(n for n in fitting if n is not None)
    size = int(num_cpus)
    return [
        Place(
            node["NodeID"],
            node["NodeManagerHostname"],
            index,
            num_cpus,
            num_gpus,
            (index * size, size) if count > 1 and size else None,
            hides_gpus=bool(gpus) and not num_gpus,
        )
        for index in range(count)
    ]
