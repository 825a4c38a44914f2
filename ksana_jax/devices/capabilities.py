"""Detects a device's capabilities by looking and, on platforms unknown to this project, by trying."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Collection, Container, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.devices.features import ALL_FEATURES, RBG, THREEFRY, THREEFRY_WORDS, Features, rbg_bits, threefry
from ksana_jax.devices.platforms import is_of, platform_of
from ksana_jax.devices.starting import started
from ksana_jax.devices.tuning import KNOWN, tuning

logger = logging.getLogger("ksana_jax")


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """Capabilities of a device.

    Args:
      platform: see `platform_of`. kind: as the device names it.
      shares_host_memory: whether it computes on the host's memory, as a CPU does.
      staging: memory that copies between it and NumPy arrays should cross: "pinned_host" or "none".
      memory_bytes: its memory, as reported or else as the setting `device` says; None if neither does.
      donates: whether a program may write its result over an argument. Without it, a step needs the pool twice.
      sizes_programs: whether its compiler reports the memory of a program.
    """

    platform: str
    kind: str
    shares_host_memory: bool
    staging: str
    memory_bytes: int | None
    donates: bool
    sizes_programs: bool


def capabilities(device: Any = None) -> Capabilities:
    """Returns a device's capabilities, by default the first one's of this process. The answer is cached."""
    with jax.ensure_compile_time_eval():  # asked while a step is traced, too
        return _found(jax.local_devices()[0] if device is None else device)


def staging_memory(kinds: Collection[str], shares_host_memory: bool) -> str:
    """Returns the memory, of the kinds that a device has, that copies between it and NumPy arrays should cross:
    "pinned_host" or "none".

    A device that computes on the host's memory would make one more copy.
    """
    return "pinned_host" if not shares_host_memory and "pinned_host" in kinds else "none"


def _shares_host_memory(device: Any) -> bool:
    """True if NumPy reads a device's arrays where they are."""
    array = jax.device_put(np.zeros(16, np.float32), jax.sharding.SingleDeviceSharding(device))
    try:
        return array.unsafe_buffer_pointer() == np.asarray(array).ctypes.data
    except Exception:  # a plugin may lack the function, and says so with an error of its own
        return False


@functools.cache
def _found(device: Any) -> Capabilities:
    platform, shares = platform_of(device), _shares_host_memory(device)
    known = platform in KNOWN
    kinds = {memory.kind for memory in device.addressable_memories()}
    compiled = None if known else _compiled(device)
    return Capabilities(
        platform=platform,
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
    with _quiet():
        lowered = jax.jit(lambda x: x + 1, donate_argnums=0).lower(argument)
    return lowered.compile()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers|Donation is not implemented", UserWarning)
        yield


def _donates(compiled: Any, device: Any) -> bool:
    given = jax.device_put(jnp.zeros(1024, jnp.float32), jax.sharding.SingleDeviceSharding(device))
    compiled(given).block_until_ready()
    return bool(given.is_deleted())


def _sizes(compiled: Any) -> bool:
    try:
        return compiled.memory_analysis() is not None
    except Exception:  # as above
        return False


def stored_as_bits(device: Any) -> Container[str]:
    """Returns the types that a pool stores as unsigned integers of the same bits, because the compiler would
    convert the whole pool at each scatter. On platforms unknown to this project, a type is tried when it is first
    asked for."""
    platform = platform_of(device)
    return tuning(platform).stored_as_bits if platform in KNOWN else _TriedBits(device)


class _TriedBits(Container[str]):
    def __init__(self, device: Any):
        self._device = device

    def __contains__(self, dtype: object) -> bool:
        return _converts_pool(self._device, str(dtype))


@functools.cache
def _converts_pool(device: Any, dtype: str) -> bool:
    """True if a scatter into a pool of a type allocates a second pool."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    pool = jax.ShapeDtypeStruct((1024, 64), jnp.dtype(dtype), sharding=sharding)
    rows = jax.ShapeDtypeStruct((4, 64), jnp.dtype(dtype), sharding=sharding)
    at = jax.ShapeDtypeStruct((4,), jnp.int32, sharding=sharding)
    write = jax.jit(lambda pool, at, rows: pool.at[at].set(rows, mode="drop"), donate_argnums=0)
    try:
        with _quiet():
            found = write.lower(pool, at, rows).compile().memory_analysis()
    except Exception:  # of a type that the device does not have: a step says so, if it has one
        return False
    return found is not None and found.temp_size_in_bytes >= pool.size * pool.dtype.itemsize


def features(device: Any) -> Features:
    """Returns the features of programs on a device: from the setting `device`, or else, on platforms unknown to this
    project, by trying. The answer is cached."""
    target = started()
    said = {} if target is None or not is_of(device, target.platform) else target.features
    return _features(device, tuple(sorted(said.items())))


@functools.cache
def _features(device: Any, said: tuple[tuple[str, Any], ...]) -> Features:
    told, platform = dict(said), platform_of(device)
    if platform in KNOWN:
        return dataclasses.replace(ALL_FEATURES, **told)
    trials: dict[str, Callable[[], Any]] = {
        "dynamic_loops": lambda: _works(device, _count_up, np.int32(1000), 32),
        "branches": lambda: _works(device, _branch, np.int32(1000), 500),
        "generator": lambda: (
            RBG if not _works(device, threefry, *THREEFRY_WORDS) and _works(device, rbg_bits) else THREEFRY
        ),
    }
    found = Features(**{name: told[name] if name in told else trial() for name, trial in trials.items()})
    for what in found.missing:
        logger.warning("%s (%s): %s", platform, device.device_kind, what)
    return found


def _count_up(most: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda i: i * i < most, lambda i: i + 1, jnp.zeros_like(most))


def _branch(number: jax.Array) -> jax.Array:
    return jax.lax.cond(number > 9, lambda x: x // 2, lambda x: x * 2, number)


def _works(
    device: Any, function: Callable[[Any], Any], argument: Any = THREEFRY_WORDS[0], expected: Any = None
) -> bool:
    """True if a function runs on a device, and returns the expected result."""
    try:
        with jax.ensure_compile_time_eval():  # asked while a step is traced, too
            given = jax.device_put(argument, jax.sharding.SingleDeviceSharding(device))
            found = np.asarray(jax.jit(function)(given))
    except Exception:  # as above
        return False
    return expected is None or np.array_equal(found, expected)
