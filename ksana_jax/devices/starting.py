"""Starts jax on the device that a setting names: registers its plugin before jax starts its backends."""

from __future__ import annotations

import logging
import os
import threading
from importlib.metadata import entry_points
from typing import Any

from ksana_jax.core import plugins, processor
from ksana_jax.core.device_setting import INSTALLED, DeviceTarget
from ksana_jax.core.errors import ConfigError
from ksana_jax.devices.custom_calls import connect
from ksana_jax.devices.platforms import is_of, platform_of

logger = logging.getLogger("ksana_jax")
_lock = threading.RLock()
_started: DeviceTarget | None = None


def started() -> DeviceTarget | None:
    """Returns the setting that jax was started with; None if it was not started by one."""
    return _started


def use_device(setting: Any) -> None:
    """Starts jax on a device, or checks that it has started on it. None leaves the choice to jax.

    The device is jax's first and default one from then on; a process has one. jax's CPU stays available next to it.

    Args:
      setting: see `DeviceTarget.read`.

    Raises:
      ConfigError: jax has already started elsewhere, there is no such plugin, or it cannot start.
    """
    global _started
    processor.hide()
    target = DeviceTarget.read(setting)
    if target is None:
        return
    from jax._src import xla_bridge

    with _lock:
        if xla_bridge.backends_are_initialized():
            return _check(target)
        _register(target)
        _start(target)
        for name in xla_bridge.expand_platform_alias(target.platform):
            connect(name)  # for custom calls that packages register with jax.ffi
        _allow_donation(target)
        _started = target
        logger.info("started %s", target)


def _check(target: DeviceTarget) -> None:
    """Checks that jax, which has started, has done so on a device."""
    import jax

    device = jax.devices()[0]
    if _started is not None:
        if target != _started:
            raise ConfigError(
                f"device is {target.plain()}, and this process runs on {_started.plain()}: a process has one device"
            )
    elif (
        target.plugin != INSTALLED
        or target.donation is not None
        or target.features
        or not is_of(device, target.platform)
    ):
        raise ConfigError(
            f"device is {target}, and jax has already started on {platform_of(device)} ({device.device_kind}): "
            "the first use of jax, such as jax.devices() or an array, must come after the engine or `use_device`"
        )


def _register(target: DeviceTarget) -> None:
    """Registers the plugin of a target, if it is not installed."""
    if target.plugin.endswith(".so"):
        from jax._src import xla_bridge

        path = os.path.abspath(target.plugin)
        try:
            xla_bridge.register_plugin(target.platform, library_path=path, options=dict(target.options))
        except Exception as error:  # errors of a library's loader and first functions
            raise ConfigError(f"device {target}: the plugin cannot be loaded: {_line(error)}") from error
    elif target.plugin != INSTALLED:
        try:
            plugins.resolve(target.plugin, {}, "device.plugin")(target.platform, target.options)
        except ConfigError as error:
            raise ConfigError(f"device {target}: {error}") from error


def _start(target: DeviceTarget) -> None:
    import jax

    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    # "gpu" stands for several platforms, and jax requires all that it is given.
    name = "cuda" if target.platform == "gpu" else target.platform
    jax.config.update("jax_platforms", ",".join(dict.fromkeys((name, "cpu"))))
    try:
        device = jax.devices()[0]
    except Exception as error:  # a plugin may raise anything
        jax.config.update("jax_platforms", before)
        raise ConfigError(_why(target, error)) from error
    if not is_of(device, target.platform):
        raise ConfigError(f"device is {target}, and jax found none: it has started on {platform_of(device)}")


def _why(target: DeviceTarget, error: Exception) -> str:
    from jax._src import xla_bridge

    known = sorted(xla_bridge._backend_factories)
    if target.platform in (*known, "gpu"):
        return f"device {target}: the plugin was found and cannot start: {_line(error)}"
    packages = sorted({point.dist.name for point in entry_points(group="jax_plugins") if point.dist is not None})
    return (
        f"device {target}: no installed plugin brings this platform. jax knows {', '.join(known)}; installed plugins: "
        f"{', '.join(packages) or 'none'}; PJRT_NAMES_AND_LIBRARY_PATHS: "
        f"{os.environ.get('PJRT_NAMES_AND_LIBRARY_PATHS') or 'not set'}"
    )


def _line(error: Exception) -> str:
    return " ".join(
        str(error).replace(" (set JAX_PLATFORMS='' to automatically choose an available backend)", "").split()
    )


def _allow_donation(target: DeviceTarget) -> None:
    """Has jax donate arrays to a platform that is not in its own list, or take it off the list.

    The list has names that clients give themselves. A plugin that calls itself "cpu" is in it, together with jax's CPU.
    """
    import jax
    from jax._src.interpreters import mlir

    platforms: list[str] = mlir._platforms_with_donation
    name = jax.devices()[0].platform
    if target.donation and name not in platforms:
        platforms.append(name)
    elif target.donation is False and name in platforms:
        platforms.remove(name)
