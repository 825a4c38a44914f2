"""Custom calls of XLA into the compiled library."""

from __future__ import annotations

import ctypes
import functools

import jax
from jax._src import xla_bridge

from ksana_jax.devices.capabilities import capabilities
from ksana_jax.devices.custom_calls import connect
from ksana_jax.native.build import library

# Dtypes of activations in which products, norms and layers compute.
DTYPES = ("float32", "bfloat16")
# Numbers of `Stored` in numbers.h. A pool on a CPU holds bfloat16 as uint16: see `kv.layout.BITS`; packed
# codes are uint8.
STORED = {"float32": 0, "bfloat16": 1, "uint16": 1, "float16": 2, "int8": 3, "uint8": 4}

# Functions of bindings.cc that steps call.
SYMBOLS = ("ksana_attend", "ksana_linear", "ksana_rms_norm", "ksana_layer_norm", "ksana_project", "ksana_rest_of_layer")
SYMBOLS += ("ksana_grouped_linear", "ksana_grouped_blocks", "ksana_short_conv", "ksana_recur")


def register_targets() -> None:
    """Registers all functions of the library, as `target` does, before steps that call them are traced."""
    for symbol in SYMBOLS:
        target(symbol)


@functools.cache
def target(symbol: str) -> str:
    """Makes a function of the library known to the platforms of this process that it can compute for; returns the name
    of the custom call, which has the library's hash: programs that jax has kept on disk call no other library.

    Raises:
      CannotBuild: the library cannot be compiled here.
    """
    path = library()
    name = f"{symbol}_{path.stem}"
    loaded = ctypes.cdll.LoadLibrary(str(path))
    for platform in xla_bridge.backends():
        if why_not_reached(platform) is None:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, symbol)), platform=platform)
    return name


def why_not_reached(platform: str) -> str | None:
    """Returns why functions of the library cannot be registered with a platform, or compute for it; None if they can.

    Args:
      platform: see `devices.platforms.platform_of`.
    """
    if platform not in xla_bridge.backends():
        return f"needs a CPU, this is {platform}"
    if reason := connect(platform):
        return reason
    if not capabilities(xla_bridge.backends()[platform].local_devices()[0]).shares_host_memory:
        return f"needs a device that computes on the host's memory; {platform} has its own"
    return None
