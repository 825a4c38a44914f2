"""Platforms whose programs can call the compiled library: found by calling it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge

from ksana_jax.native.build import why_missing
from ksana_jax.native.operators import rms_norm
from ksana_jax.native.target import why_not_reached


def why_not_called(platform: str) -> str | None:
    """Returns why programs on a platform cannot call functions of this package's library, or None.

    Args:
      platform: see `devices.platforms.platform_of`; "cpu" is jax's own CPU, which can.
    """
    if platform == "cpu":
        return why_missing()
    return why_not_reached(platform) or why_missing() or _tried(xla_bridge.backends()[platform].local_devices()[0])


@functools.cache
def _tried(device: Any) -> str | None:
    """Returns why a function gives wrong results in a program on a device, or None."""
    x, weight, expected = np.full((2, 8), 3, np.float32), np.arange(8, dtype=np.float32), np.arange(8)
    try:
        with jax.ensure_compile_time_eval():  # asked while a step is traced, too
            given = jax.device_put((x, weight), jax.sharding.SingleDeviceSharding(device))
            found = np.asarray(jax.jit(functools.partial(rms_norm, eps=0.0))(*given))
    except Exception as error:  # whatever a plugin may raise
        if "No FFI handler registered" in str(error):  # OpenXLA's answers that it has registered the function
            return "the plugin drops the library's functions without an error: its XLA is older than their FFI headers"
        return f"a custom call fails on it: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
    if not np.allclose(found, expected, rtol=1e-6):
        return f"a custom call gives {found[0].tolist()}, expected {expected.tolist()}"
    return None
