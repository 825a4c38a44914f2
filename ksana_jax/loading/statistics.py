"""Finds the files of `ksana calibrate` that an engine's settings need, for its model. No jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import resolve
from ksana_jax.core.statistics import default_file, read_statistics
from ksana_jax.kv.eviction import EVICTION_METHODS
from ksana_jax.loading.digest import digest_of_files


def with_statistics(config: EngineConfig, model: Path, load_format: str = "auto") -> EngineConfig:
    """Returns a configuration whose methods name the files with the model's numbers.

    Args:
      model: a model's directory or GGUF file.

    Raises:
      ConfigError: a file is missing, or of another model.
    """
    methods = config.kv_eviction, config.kv_cache_dtype
    if not any(_calibrated(setting) for setting in methods):
        return config
    digest = digest_of_files(model, load_format)
    eviction, codec = (_filled(setting, model, digest) for setting in methods)
    return dataclasses.replace(config, kv_eviction=eviction, kv_cache_dtype=codec)


def statistics_inputs(config: EngineConfig, model: Path, load_format: str) -> dict[str, str]:
    """Returns digests, for records, of the numbers that an engine's methods read, and of the texts they are from."""
    found: dict[str, str] = {}
    config = with_statistics(config, model, load_format)
    for method, kind in (*_calibrated(config.kv_eviction), *_calibrated(config.kv_cache_dtype)):
        statistics = read_statistics(method["statistics"], kind)
        found |= {f"{kind}_text": statistics.sha256[:16], f"{kind}_numbers": statistics.digest}
    return found


def _kind(setting: Any) -> str | None:
    """Returns the kind of numbers that the method, or the codec, of a setting reads; None if it reads none."""
    if not isinstance(setting, Mapping):
        return None
    if "method" not in setting:
        return "kvquant" if setting.get("statistics") is not None else None
    return getattr(resolve(setting["method"], EVICTION_METHODS, "method"), "calibrated_for", None)


def _calibrated(setting: Any) -> list[tuple[Mapping[str, Any], str]]:
    """Returns the settings of methods that read numbers, also of methods around others, and the kinds of numbers."""
    if not isinstance(setting, Mapping):
        return []
    own = [] if (kind := _kind(setting)) is None else [(setting, kind)]
    return own + [found for value in setting.values() for found in _calibrated(value)]


def _filled(setting: Any, model: Path, digest: str) -> Any:
    if not isinstance(setting, Mapping):
        return setting
    found = {name: _filled(value, model, digest) for name, value in setting.items()}
    if (kind := _kind(setting)) is not None:
        file = found.get("statistics")
        if file is None and not (file := default_file(kind, digest)).exists():
            raise ConfigError(
                f"{setting['method']} reads numbers about the model, and {file} does not exist: "
                f"ksana calibrate {model} --text TEXT --for {kind}"
            )
        read_statistics(file, kind, digest)
        found["statistics"] = str(file)
    return found
