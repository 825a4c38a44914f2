"""Names of devices by the backend that jax registered, not by the plugin's own name."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import Any

from ksana_jax.core.device_setting import OF_JAX

logger = logging.getLogger("ksana_jax")


@functools.cache
def warn_of_unused_gpu(platform: str, driver: Path = Path("/proc/driver/nvidia/version")) -> None:
    """Warns, once, if an engine runs on the CPU of a machine with NVIDIA's driver, unless JAX_PLATFORMS asks for it."""
    if platform == "cpu" and not os.environ.get("JAX_PLATFORMS") and driver.exists():
        logger.warning(
            "this machine has an NVIDIA driver, but jax sees only its CPU: the extra cuda, `pip install -e '.[cuda]'`, "
            "gives jax its plugin; JAX_PLATFORMS=cpu silences this warning"
        )


def platform_of(device: Any = None) -> str:
    """Returns the name of a device's platform, by default of this process's first device.

    It is the name under which jax has registered the device's backend: a plugin may give its client, its devices or
    their kind any name, such as "cpu". Backends that jax brings itself ("cuda", "rocm") are named by their kind, "gpu";
    so are devices of no backend, which programs are only compiled for.
    """
    import jax
    from jax._src import xla_bridge

    device = jax.local_devices()[0] if device is None else device
    client = getattr(device, "client", None)
    names = (name for name, backend in xla_bridge.backends().items() if backend is client)
    return next((name for name in names if name not in OF_JAX), device.platform)


def is_of(device: Any, platform: str) -> bool:
    """True if a device is of a platform, by jax's name of its backend or by an alias of that name, such as "gpu"."""
    from jax._src import xla_bridge

    backends = xla_bridge.backends()
    return any(backends.get(name) is device.client for name in xla_bridge.expand_platform_alias(platform))
