"""What the engine asks of a device, found by looking and, on platforms that this project has not met, by trying."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.devices.starting import started

# Where donation and the sizes of programs are known to work: nothing is compiled to find out.
_KNOWN = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a device can do.

    Args:
      platform, kind: as jax names them.
      shares_host_memory: whether it computes on the host's memory, as a CPU does.
      staging: memory that copies between it and NumPy arrays should cross: "pinned_host" or "none".
      memory_bytes: its memory: what it reports, or else what the setting `device` says; None if neither does.
      donates: whether a program may write its result over an argument. Without it, a step needs the pool twice.
      sizes_programs: whether its compiler says how much memory a program takes.
    """

    platform: str
    kind: str
    shares_host_memory: bool
    staging: str
    memory_bytes: int | None
    donates: bool
    sizes_programs: bool


def capabilities(device: Any = None) -> Capabilities:
    """Returns what a device can do, by default jax's first one. The answer is kept."""
    return _found(jax.devices()[0] if device is None else device)


def staging_memory(kinds: Collection[str], shares_host_memory: bool) -> str:
    """Returns the memory, of the kinds that a device has, that copies between it and NumPy arrays should cross:
    "pinned_host" or "none".

    A device that computes on the host's memory would make one more copy.
    """
    return "pinned_host" if not shares_host_memory and "pinned_host" in kinds else "none"


def _shares_host_memory(device: Any) -> bool:
    """Whether NumPy reads a device's arrays where they are."""
    array = jax.device_put(np.zeros(16, np.float32), jax.sharding.SingleDeviceSharding(device))
    try:
        return array.unsafe_buffer_pointer() == np.asarray(array).ctypes.data
    except Exception:  # a plugin may lack the function, and says so with an error of its own
        return False


@functools.cache
def _found(device: Any) -> Capabilities:
    known, shares = device.platform in _KNOWN, _shares_host_memory(device)
    kinds = {memory.kind for memory in device.addressable_memories()}
    compiled = None if known else _compiled(device)
    return Capabilities(
        platform=device.platform,
        kind=device.device_kind,
        shares_host_memory=shares,
        staging=staging_memory(kinds, shares),
        memory_bytes=None if shares else _memory_bytes(device),
        donates=known or _donates(compiled, device),
        sizes_programs=known or _sizes(compiled),
    )


def _memory_bytes(device: Any) -> int | None:
    try:
        reported = (device.memory_stats() or {}).get("bytes_limit")
    except Exception:  # as above
        reported = None
    if reported:
        return int(reported)
    target = started()
    return None if target is None else target.memory_bytes


def _compiled(device: Any) -> Any:
    """Returns a small program that writes its result over its argument, if it may."""
    argument = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    return _lowered(argument).compile()


def _lowered(argument: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Donation is not implemented", UserWarning)
        return jax.jit(lambda x: x + 1, donate_argnums=0).lower(argument)


def _donates(compiled: Any, device: Any) -> bool:
    given = jax.device_put(jnp.zeros(1024, jnp.float32), jax.sharding.SingleDeviceSharding(device))
    compiled(given).block_until_ready()
    return bool(given.is_deleted())


def _sizes(compiled: Any) -> bool:
    try:
        return compiled.memory_analysis() is not None
    except Exception:  # as above
        return False
