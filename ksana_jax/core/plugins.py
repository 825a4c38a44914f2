"""Resolves the name in a setting: an entry of a registry, or a user's object as "package.module:name".

A policy or a task can thus be in the user's project. Modules are found on the Python path, next to the experiment's
file and in the working directory. Names in files of others are resolved within `trusting`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError

T = TypeVar("T")
_DATACLASS = "@dataclasses.dataclass(frozen=True, kw_only=True)"
_trusted: ContextVar[Collection[str] | None] = ContextVar("trusted", default=None)
_folders: list[str] = []


@contextlib.contextmanager
def trusting(names: Collection[str] | None) -> Iterator[None]:
    """Lets `resolve` import own code only by these names "package.module:name", in this thread; None: all of it."""
    token = _trusted.set(names)
    try:
        yield
    finally:
        _trusted.reset(token)


def search_in(folder: str | os.PathLike[str]) -> None:
    """Lets own code be found in the folder of the user's experiment, from now on in this process."""
    place = os.path.abspath(folder)
    _folders[:] = [place, *(known for known in _folders if known != place)]


def own_folders() -> tuple[str, ...]:
    """Returns the folders in which own modules are found that are not on the Python path, the newest first."""
    return (*_folders, os.getcwd())


def resolve(spec: Any, registry: Mapping[str, Any], what: str) -> Any:
    """Returns the function or class that a setting names.

    Args:
      spec: a key of the registry, "package.module:name" of a callable, or a callable.
      registry: {name: object}; a value that is a string is imported as "package.module:name".
      what: name of the setting, for messages.

    Raises:
      ConfigError: there is no such name, module or attribute, it cannot be imported, it is not callable, or own code
        is not trusted here.
    """
    if isinstance(spec, str) and spec in registry:
        found = registry[spec]
        return _imported(found, what) if isinstance(found, str) else found
    if isinstance(spec, str) and ":" in spec:
        if (trusted := _trusted.get()) is not None and spec not in trusted:
            raise ConfigError(f"{what} is {spec!r:.80}: code that a file names runs only with --own-code")
        spec = _imported(spec, what)
    if not callable(spec):
        hint = nearest_hint(spec, registry) if isinstance(spec, str) else ""
        names = ", ".join(registry)
        raise ConfigError(f"{what} is {spec!r:.80}, must be one of {names}, or 'package.module:name'{hint}")
    return spec


def read_method(setting: Mapping[str, Any], registry: Mapping[str, Any], kind: type[T], what: str, example: str) -> T:
    """Returns the dataclass that a setting names, with its fields.

    Args:
      setting: {"method": as `resolve` takes it, and fields}. kind: its required base class.
      what: name of the setting, example: a value of it, for messages.

    Raises:
      ConfigError: there is no such method or field, or a value is out of range.
    """
    if not isinstance(setting, Mapping) or "method" not in setting:
        no_method = "; it names no method: a row that a grid must not change needs grid: false"
        hint = no_method if isinstance(setting, Mapping) else ""
        raise ConfigError(f"{what} is {setting!r:.80}, must be None or a dict such as {example}{hint}")
    name, fields = setting["method"], {key: value for key, value in setting.items() if key != "method"}
    found = resolve(name, registry, f"{what} method")
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{what} method is {name!r}, which is not a subclass of {kind.__name__}")
    known = {field.name: field.default for field in dataclasses.fields(found)}  # pyright: ignore[reportArgumentType]  methods are dataclasses
    own, hints = vars(found), inspect.get_annotations(found)
    lost = [n for n in known.keys() & own if own[n] is not known[n] and not inspect.ismemberdescriptor(own[n])]
    lost += [n for n, hint in hints.items() if not (n in known or hasattr(kind, n) or "ClassVar" in str(hint))]
    if lost:  # they would have no effect
        raise ConfigError(f"{what} {name!r}: {min(lost)} is no field: it needs a type, and the class {_DATACLASS}")
    for key in fields:
        if key not in known:
            hint = nearest_hint(str(key), known) or f"; it has {', '.join(known)}"
            raise ConfigError(f"{what} {name!r} has no setting {key!r}{hint}")
    problems = [
        _wrong_type(f"{what} {name!r}: {key}", fields[key], hint) for key, hint in _hints(found, fields).items()
    ]
    try:
        method = found(**fields)
    except ConfigError:
        raise
    except Exception:  # of arithmetic with a value of the wrong type
        checks.require(*problems, error=ConfigError)
        raise
    checks.require(*problems, error=ConfigError)
    return method


_TYPES = {int: "an integer", float: "a finite number", bool: "True or False", str: "a text", type(None): "None"}


def _hints(method: type, fields: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Returns the types of fields that may only have numbers, texts, True, False and None."""
    try:
        hints = typing.get_type_hints(method)
    except (NameError, TypeError):  # of a user's class, which may import names for type checkers only
        return {}
    found = {name: typing.get_args(hints.get(name)) or (hints.get(name),) for name in fields}
    return {name: hint for name, hint in found.items() if all(each in _TYPES for each in hint)}


def _wrong_type(name: str, value: Any, hint: tuple[Any, ...]) -> str | None:
    is_number = checks.is_integer(value) or isinstance(value, float)
    if (is_number and float in hint) or (type(value) in hint and type(value) is not float):
        return None
    return f"{name} is {checks.shown(value)}, must be {' or '.join(_TYPES[each] for each in hint)}"


def name_of(spec: Any) -> Any:
    """Returns a name for records that is the same in every process: "package.module:name" of a callable.

    An object that is not a function or class gets the name of its class. Values that are not callable are returned
    unchanged.
    """
    if not callable(spec):
        return spec
    named = spec if hasattr(spec, "__qualname__") else type(spec)
    return f"{named.__module__}:{named.__qualname__}"


def line_of(error: BaseException, module: str) -> str:
    """Returns the line of a user's module, or its package, that led to an error: " (mine.py, line 3)"; or ""."""
    frames, top = traceback.walk_tb(error.__traceback__), module.partition(".")[0]
    own = [at for at in frames if at[0].f_globals.get("__name__", "").partition(".")[0] == top]
    return f" ({os.path.basename(own[-1][0].f_code.co_filename)}, line {own[-1][1]})" if own else ""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the most similar name; None if none is similar enough. A cutoff of 0 always finds one."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)), None)


def nearest_hint(name: str, names: Iterable[str]) -> str:
    """Returns the end of an error message that names the most similar name; empty if none is similar enough."""
    close = nearest(name, names)
    return f"; the nearest is {close!r}" if close else ""


def _imported(spec: str, what: str) -> Any:
    module_name, _, path = spec.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{what} is {spec!r}, must be 'package.module:name'")
    found: Any = _module(spec, module_name, what)
    for name in path.split("."):
        if not hasattr(found, name):
            hint = nearest_hint(name, [n for n in dir(found) if not n.startswith("_")])
            raise ConfigError(f"{what} is {spec!r}, but {module_name} has no {path!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{what} is {spec!r}, which is of type {type(found).__name__}, not a function or class")
    return found


def _module(spec: str, name: str, what: str) -> Any:
    top = name.partition(".")[0]
    try:
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            # Appended, so that nothing in these folders shadows an installed package.
            sys.path += [folder for folder in own_folders() if folder not in sys.path]
        found = importlib.import_module(name)
    except Exception as error:  # whatever a user's module may raise
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            where = "on the Python path, next to the experiment's file or in the working directory"
            raise ConfigError(f"{what} is {spec!r}, but there is no module {missing!r} {where}") from None
        reason = f"{type(error).__name__}: {error}{line_of(error, name)}"
        reason += f"; it needs {_DATACLASS}" * ("non-frozen" in reason)
        raise ConfigError(f"{what} is {spec!r}, but importing {name!r} failed: {reason}") from error
    taken = getattr(sys.modules.get(top), "__file__", None) or ""
    for folder in _folders[:1] if taken and top != __name__.partition(".")[0] else ():
        for meant in (os.path.join(folder, f"{top}.py"), os.path.join(folder, top, "__init__.py")):
            if os.path.isfile(meant) and not os.path.samefile(meant, taken):
                raise ConfigError(f"{what} is {spec!r}, but {meant} is hidden by {taken}: rename it")
    return found
