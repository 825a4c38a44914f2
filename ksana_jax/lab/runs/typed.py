"""Gives the plain values of an experiment the types of its fields. Knows no trials."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, KeyValidationError, OmegaConfBaseException

from ksana_jax.core.config import ConfigError
from ksana_jax.core.errors import LoadError
from ksana_jax.core.plugins import nearest
from ksana_jax.lab.runs import dotted
from ksana_jax.lab.runs.models import training_context
from ksana_jax.lab.runs.tasks import task_named


def typed(experiment: type, given: Mapping[str, Any]) -> Any:
    """Returns an experiment's fields with their types, including the task's settings.

    Args:
      experiment: the dataclass of its fields.

    Raises:
      ConfigError: a key is unknown or a value has the wrong type.
    """
    OmegaConf.register_resolver("context", _context, replace=True)
    schema = OmegaConf.structured(experiment)
    try:
        task = str(given.get("task", schema.task))
        schema.settings = OmegaConf.structured(task_named(task).Settings)
        defaults = dotted.plain(schema)
        # Without a text, as in `pivot=`, the default applies.
        given = {k: v for k, v in given.items() if v is not None or not isinstance(defaults.get(k), str)}
        _check_containers(given, defaults)
        return OmegaConf.merge(schema, OmegaConf.create(dict(given)))
    except OmegaConfBaseException as error:
        raise explained(error, task) from error


def _check_containers(given: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> None:
    """Rejects a mapping instead of a list, as from an override such as `seeds[0]=1`, and the reverse."""
    for key, value in given.items():
        default, name = defaults.get(key), f"{prefix}{key}"
        if isinstance(default, list) and isinstance(value, Mapping):
            raise ConfigError(
                f"{name} is a list whose items cannot be set separately: set the whole list, {name}=[...]"
            )
        is_one = isinstance(value, (bool, int, float, str)) and not str(value).startswith("${")
        if isinstance(default, list) and is_one:
            raise ConfigError(f"{name} is {value!r:.60}, must be a list, such as [{value!s:.60}]")
        if isinstance(default, Mapping) and value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} is {value!r:.60}, must be a mapping of keys to values")
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            _check_containers(value, default, f"{name}.")


def _context(multiple: int | float | str, *, _root_) -> int:
    """Resolves `${context:1/4}` in a YAML file: a multiple of the model's training context, in tokens."""
    try:
        factor = Fraction(str(multiple))
    except ValueError as error:
        raise ConfigError(f"${{context:{multiple}}} is not a multiple such as 4 or 1/2") from error
    tokens = factor * training_context(_root_.model)
    if tokens.denominator != 1:
        raise ConfigError(f"${{context:{multiple}}} is {float(tokens):g} tokens of {_root_.model}, not a whole number")
    return int(tokens)


def explained(error: OmegaConfBaseException, task: str = "") -> ConfigError | LoadError:
    """Returns what OmegaConf found wrong in one line, with the nearest key, and the task if it is a setting's."""
    cause: BaseException | None = error
    while isinstance(cause, InterpolationResolutionError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, LoadError):
        return cause
    if isinstance(cause, (ConfigError, FileNotFoundError)):
        return ConfigError(str(cause))
    key = error.full_key or error.key
    if isinstance(error, ConfigKeyError) and dataclasses.is_dataclass(error.object_type):
        names = [f.name for f in dataclasses.fields(error.object_type)]
        close = nearest(str(error.key), names, cutoff=0.0)
        hint = f"the nearest is {close!r}" if close else "there are none here"
        whose = f" of task {task!r}" if str(key).startswith("settings.") else ""
        return ConfigError(f"unknown key {key!r}{whose}; {hint}")
    message = str(error).splitlines()[0]
    if isinstance(error, KeyValidationError):
        message += ": a key is text, in quotes where YAML takes it for null or a number"
    return ConfigError(f"{key}: {message}" if key else message)
