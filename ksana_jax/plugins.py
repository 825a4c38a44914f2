"""Finds what a setting names: an entry of a registry, or an object of the user's own as "package.module:name".

So a policy or a task can live in the user's project. Modules are found on the Python path and in the working directory.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ksana_jax.errors import ConfigError


def resolve(spec: Any, registry: Mapping[str, Any], what: str) -> Any:
    """Returns the function or class that a setting names.

    Args:
      spec: a key of the registry, "package.module:name" of anything callable, or something callable itself.
      registry: {name: object}; a value that is a string is imported as "package.module:name".
      what: the setting, for messages.

    Raises:
      ConfigError: there is no such name, module or attribute, it cannot be imported, or what it names is not callable.
    """
    if isinstance(spec, str) and spec in registry:
        found = registry[spec]
        return _imported(found, what) if isinstance(found, str) else found
    if isinstance(spec, str) and ":" in spec:
        spec = _imported(spec, what)
    if not callable(spec):
        raise ConfigError(f"{what} is {spec!r:.80}, must be one of {', '.join(registry)}, or 'package.module:name'")
    return spec


def name_of(spec: Any) -> Any:
    """Returns a name that is the same in every process, for records: "package.module:name" of a callable.

    An object that is not a function or class goes by its class. Values that are not callable are returned as they are.
    """
    if not callable(spec):
        return spec
    named = spec if hasattr(spec, "__qualname__") else type(spec)
    return f"{named.__module__}:{named.__qualname__}"


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the name most like a given one; None where none is alike. A cutoff of 0 always finds one."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)


def _imported(spec: str, what: str) -> Any:
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{what} is {spec!r}, must be 'package.module:name'")
    found: Any = _module(spec, module_name, what)
    for name in path.split("."):
        if not hasattr(found, name):
            names = [n for n in dir(found) if not n.startswith("_")]
            close = nearest(name, names)
            hint = f"; the nearest is {close!r}" if close else ""
            raise ConfigError(f"{what} is {spec!r}, but {module_name} has no {path!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{what} is {spec!r}, which is of type {type(found).__name__}, not a function or class")
    return found


def _module(spec: str, name: str, what: str) -> Any:
    top = name.partition(".")[0]
    try:
        known = top in sys.modules or importlib.util.find_spec(top) is not None
        if not known and os.getcwd() not in sys.path:
            # Appended, so that nothing in the working directory hides an installed package.
            sys.path.append(os.getcwd())
        return importlib.import_module(name)
    except Exception as error:  # whatever a user's module may raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            where = "on the Python path or in the working directory"
            raise ConfigError(f"{what} is {spec!r}, but there is no module {missing!r} {where}") from None
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{what} is {spec!r}, but importing {name!r} failed: {reason}") from error
