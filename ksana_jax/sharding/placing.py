"""Chooses the devices of an engine, and checks that there are enough of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax

from ksana_jax.core.config import ConfigError
from ksana_jax.core.processor import num_cores
from ksana_jax.devices.platforms import platform_of
from ksana_jax.sharding.placement import ONE_DEVICE, Placement
from ksana_jax.sharding.tensor_parallel import TensorParallel


def place_on(num_devices: int, num_processes: int = 1, *, replica: int = 0, num_replicas: int = 1) -> Placement:
    """Returns the placement of one of several replicas on jax's devices, as many of each process.

    Raises:
      ConfigError: there are fewer devices, or on a CPU too few threads for their sums.
    """
    if num_processes == num_devices == num_replicas == 1:
        return ONE_DEVICE
    if num_devices % num_processes:
        raise ConfigError(
            f"tensor_parallel_size is {num_devices}, must be a multiple of num_processes {num_processes}: each process "
            "has as many of the devices"
        )
    local, found = num_devices // num_processes, []
    for process in range(num_processes):
        devices = jax.local_devices(process_index=process if num_processes > 1 else None)
        if len(devices) < local * num_replicas:
            where = "there are" if num_processes == 1 else f"and process {process} has"
            asked = f"tensor_parallel_size is {num_devices}"
            if num_replicas > 1:
                asked = f"data_parallel_size {num_replicas} x tensor_parallel_size {num_devices} needs as many devices"
            raise ConfigError(f"{asked}, {where} {_counted(devices, local * num_replicas)}")
        found += devices[replica * local : (replica + 1) * local]
    if platform_of(found[0]) == "cpu" and local > 1:  # jax's own, whose number of threads is known
        _check_threads(num_devices, local * num_replicas)
    return Placement(found[0]) if num_devices == 1 else TensorParallel(found)


def _counted(devices: Sequence[Any], needed: int) -> str:
    """Describes the number of devices, and on a CPU the way to get as many as needed."""
    platform, hint = platform_of(devices[0]), ""
    if platform == "cpu":
        hint = f"; the environment variable XLA_FLAGS=--xla_force_host_platform_device_count={needed} makes more"
    return f"{len(devices)} devices ({platform}){hint}"


def _check_threads(num_devices: int, needed: int) -> None:
    if (threads := _threads(len(jax.local_devices()))) < THREADS_OF_DEVICE * needed:
        raise ConfigError(
            f"tensor_parallel_size is {num_devices}, and XLA has {threads} threads on this CPU: its devices wait for "
            f"each other in threads, and would do so for ever; set the environment variable NPROC="
            f"{THREADS_OF_DEVICE * needed}"
        )


# XLA's threads on a CPU for each device: one waits in a sum, others compute what it waits for. With 8 and 9 threads for
# 8 devices sums never ended, with 10 they did (jaxlib 0.10.2, two cores).
THREADS_OF_DEVICE = 2


def _threads(num_devices: int) -> int:
    """Returns the threads of XLA's pool on a CPU (xla/pjrt/utils.cc, DefaultThreadPoolSize)."""
    given = next((int(n) for name in ("PJRT_NPROC", "NPROC") if (n := os.environ.get(name, "")).isdecimal()), None)
    return max(given or num_cores(), num_devices)
