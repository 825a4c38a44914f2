"""The setting `device`: a platform of jax, and the PJRT plugin that brings it. Knows no jax."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import nearest

INSTALLED = "installed"
# Fields of `features.Features`, and their values.
FEATURES = {"dynamic_loops": (True, False), "branches": (True, False), "generator": ("threefry", "rbg")}
# Platforms that jax brings itself, by name or by alias.
OF_JAX = ("cpu", "gpu", "cuda", "rocm", "oneapi", "tpu")


@dataclasses.dataclass(frozen=True)
class DeviceTarget:
    """Names the device that an engine runs on.

    Args:
      platform: jax's name of the platform: "cpu", "cuda", "tpu", or a plugin's, such as "npu".
      plugin: "installed" where jax finds the plugin itself (a package with an entry point of the group jax_plugins, a
        module in the namespace package jax_plugins, or PJRT_NAMES_AND_LIBRARY_PATHS); the path of the plugin's shared
        library; or "package.module:function" of a function (platform, options) that registers the platform with jax.
      options: options of the plugin, {name: text, number or list of integers}. An installed plugin takes none here.
      donation: whether jax may tell the device that a step's pool is donated to it. jax does so for the platforms that
        it knows; for another one you assert that the plugin supports it. None: for the platforms that jax knows.
        Without donation, a step needs the pool twice.
      memory_bytes: memory of the device, for one that does not report it.
      features: operations that programs may use, {name: value} of `features.Features`. Values omitted here are
        known for jax's own platforms, and found by trying on others.
    """

    platform: str
    plugin: str = INSTALLED
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    donation: bool | None = None
    memory_bytes: int | None = None
    features: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, given: Any) -> DeviceTarget | None:
        """Reads the setting: a platform's name, or a mapping with the fields above; None and "auto" leave it to jax.

        Raises:
          ConfigError: a field is unknown, or a value cannot be.
        """
        if given is None or given == "auto":
            return None
        if isinstance(given, str):
            return cls(given)
        if not isinstance(given, Mapping):
            raise ConfigError(f"device is {given!r:.80}, must be a platform's name or a mapping with a platform")
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in given if name not in known]:
            close = nearest(str(unknown[0]), known, cutoff=0.0)
            raise ConfigError(f"device has no field {unknown[0]!r}; the nearest is {close!r}")
        if "platform" not in given:
            raise ConfigError(f"device has no platform: {dict(given)!r:.80}")
        return cls(**given)

    def __post_init__(self):
        if not isinstance(self.platform, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", self.platform):
            raise ConfigError(f"device.platform is {self.platform!r:.80}, must be a name such as npu")
        object.__setattr__(self, "platform", self.platform.lower())  # as jax registers it
        if self.plugin != INSTALLED and ":" not in str(self.plugin) and not str(self.plugin).endswith(".so"):
            raise ConfigError(
                f"device.plugin is {self.plugin!r:.80}, must be {INSTALLED}, the path of a library (.so) or "
                "'package.module:function'"
            )
        object.__setattr__(self, "plugin", str(self.plugin))
        if self.plugin != INSTALLED and self.platform in OF_JAX:
            raise ConfigError(f"device.platform is {self.platform!r}, jax's own name: give the plugin's another one")
        if not isinstance(self.options, Mapping):
            raise ConfigError(f"device.options is {self.options!r:.80}, must be a mapping")
        object.__setattr__(self, "options", dict(self.options))
        if not isinstance(self.features, Mapping):
            raise ConfigError(f"device.features is {self.features!r:.80}, must be a mapping")
        object.__setattr__(self, "features", dict(self.features))
        for name, value in self.features.items():
            if name not in FEATURES or value not in FEATURES[name]:
                known = ", ".join(f"{name} ({' or '.join(map(str, values))})" for name, values in FEATURES.items())
                raise ConfigError(f"device.features has {name}: {value!r:.40}; there are {known}")
        if self.plugin == INSTALLED and self.options:
            raise ConfigError(
                "device.options are for a plugin given by its path or as 'package.module:function': "
                "an installed one has its own"
            )
        if self.plugin.endswith(".so") and not Path(self.plugin).is_file():
            raise ConfigError(f"device.plugin is {self.plugin}, and there is no such file")
        checks.require(
            None if self.donation is None else checks.boolean("device.donation", self.donation),
            checks.integer("device.memory_bytes", self.memory_bytes, 1, 2**62, optional=True),
            error=ConfigError,
        )

    def plain(self) -> dict[str, Any]:
        """Returns the fields that differ from their defaults, as JSON values."""
        fields = dataclasses.asdict(self)
        defaults = {"plugin": INSTALLED, "options": {}, "donation": None, "memory_bytes": None, "features": {}}
        return {name: value for name, value in fields.items() if name == "platform" or value != defaults[name]}

    def __str__(self) -> str:
        return self.platform if self.plugin == INSTALLED else f"{self.platform} ({self.plugin})"


def canonical_device(given: Any) -> dict[str, Any] | None:
    """Returns one spelling of each value of the setting.

    Raises:
      ConfigError: it is wrong.
    """
    target = DeviceTarget.read(given)
    return None if target is None else target.plain()
