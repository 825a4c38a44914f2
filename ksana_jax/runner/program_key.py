"""Digest of everything that determines a compiled program.

A value that cannot be digested, such as code outside the package, raises `NotStored`: its programs are compiled in each
process.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import operator
import os
import pathlib
import platform
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from jax._src import config as jax_config
from jax._src.core import AxisEnv

from ksana_jax.core.compilation_cache import started_s
from ksana_jax.core.own_code import PACKAGES
from ksana_jax.core.processor import machine
from ksana_jax.devices.platforms import platform_of
from ksana_jax.native import build
from ksana_jax.runner.value_digest import LIBRARIES, ForeignCode, NotStored, Walk

# Packages of ksana_jax that no program is traced through.
UNTRACED = ("assets", "cli", "engine", "extend", "lab", "loading", "serve", "tokenizers")
_SOURCES = (".py", ".cc", ".h", ".so")
# Settings of jax that no program depends on, and environment variables that XLA reads.
_IRRELEVANT = re.compile("cache|logging_level|traceback_filtering")
_ENVIRONMENT = ("XLA_", "TF_", "LIBTPU_")
_MEMBERS = (types.FunctionType, property, staticmethod, classmethod, int, float, str, tuple)


class Lowering(functools.partial):
    """A function of the package that lowers a program when it is called.

    Its positional arguments are trees of arrays, of which only shapes count; its keywords count by value. Nothing else
    may determine the program, except code and settings of the process.
    """

    def parts(self, lowered: Any) -> Sequence[Any]:
        """Returns the programs (`jax.stages.Lowered`) of which its result consists."""
        return (lowered,)

    def assembled(self, programs: Sequence[Any]) -> Callable:
        """Returns the function of its programs, compiled."""
        return programs[0]


def digest_of(lowering: Lowering, walk: Walk) -> str:
    """Returns 64 hex digits of a program and of the process that would trace it.

    Args:
      lowering: of shapes. walk: may be shared by programs whose arguments live as long.

    Raises:
      NotStored: a value cannot be digested.
    """
    parts = [walk(_process()), walk(lowering.func), walk(lowering.keywords), *map(walk.shapes, lowering.args)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _process() -> tuple[Any, ...]:
    """Returns what programs depend on besides their own values: code, versions, machine, and settings of jax.

    Raises:
      NotStored: the package was edited after this process had started.
    """
    values = {name: repr(x) for name, x in jax.config.values.items() if not _IRRELEVANT.search(name)}
    context = [
        (repr(x.axis_sizes), repr(x.spmd_axis_names), repr(x.explicit_mesh_axis_names))
        if isinstance(x, AxisEnv)
        else repr(x)
        for x in jax_config.trace_context()
    ]
    environment = sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT))
    # An engine asks for the library before it chooses one of its functions.
    native = build.why_missing() or build.library().name if build.was_asked() else None
    found = sources(), _versions(), machine(), native, values, context, environment
    return *found, jax.local_devices()[0], platform_of()


@functools.cache
def _versions() -> tuple[str | None, ...]:
    return sys.version, platform.platform(), *map(_version, LIBRARIES)


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


@functools.cache
def sources() -> str:
    """Digests all source files of the package.

    Raises:
      NotStored: see `has_edits`.
    """
    if has_edits():
        raise NotStored("the package was edited after this process had started")
    digest = hashlib.sha256()
    for name, path in _source_files():
        content = path.read_bytes()
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def has_edits() -> bool:
    """True if source files are newer than this process, which may run the older ones."""
    return any(path.stat().st_ctime >= started_s for _, path in _source_files())


def _source_files() -> list[tuple[str, pathlib.Path]]:
    """Returns (name, path) of the source files of the package, in any language."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    folders = [pathlib.Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    found = [(folder, path) for folder in folders for path in folder.rglob("*") if path.suffix in _SOURCES]
    return sorted((str(path.relative_to(folder.parent)), path) for folder, path in found)


def traced_modules() -> list[str]:
    """Returns the loaded modules of the package that programs may be traced through."""
    names = (name.split(".") for name in list(sys.modules))  # other threads import
    return sorted(".".join(n) for n in names if n[0] in PACKAGES and (len(n) == 1 or n[1] not in UNTRACED))


def bindings(modules: Iterable[str]) -> str:
    """Returns a digest of the functions, classes and constants in modules, which a process may have replaced.

    Raises:
      NotStored: some are code outside the package.
      ImportError: there is no such module.
    """
    walk, digest = Walk(), hashlib.sha256()
    for module in modules:
        found = sys.modules.get(module) or importlib.import_module(module)
        digest.update(_bindings(module, vars(found).copy(), walk))  # other threads import modules into it
    return digest.hexdigest()


# {module: (what its names and its classes' names are bound to, its digest)}
_bindings_before: dict[str, tuple[list[Any], bytes]] = {}


def _bindings(module: str, names: Mapping[str, Any], walk: Walk) -> bytes:
    classes = [x for x in names.values() if isinstance(x, type) and x.__module__ == module]
    values = [*names.values(), *(member for x in classes for member in vars(x).values())]
    before = _bindings_before.get(module)
    if before is None or len(before[0]) != len(values) or not all(map(operator.is_, before[0], values)):
        parts = [_bound(walk, f"{module}.{name}", x) for name, x in names.items() if callable(x) or name.isupper()]
        for x in classes:
            members = (item for item in vars(x).items() if isinstance(item[1], _MEMBERS))
            parts += [_bound(walk, f"{module}.{x.__name__}.{name}", member) for name, member in members]
        _bindings_before[module] = before = values, hashlib.sha256(b"".join(parts)).digest()
    tables = (item for item in names.items() if item[0].isupper() and isinstance(item[1], dict | list | set))
    return before[1] + b"".join(_bound(walk, f"{module}.{name}", table) for name, table in tables)


def _bound(walk: Walk, name: str, x: Any) -> bytes:
    try:
        return name.encode() + walk(x)
    except ForeignCode as error:
        raise NotStored(f"{name} was replaced: {error}") from None
    except NotStored:
        return f"{name} {type(x).__name__}".encode()
