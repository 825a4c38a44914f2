"""Digest of everything that determines a compiled program.

Values are digested field by field. What cannot be digested completely, such as code outside the package, raises
`NotStored`: its programs are compiled in each process.
"""

from __future__ import annotations

import dataclasses
import enum
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import config as jax_config
from jax._src.core import AxisEnv

from ksana_jax.core.compilation_cache import started_s
from ksana_jax.core.own_code import PACKAGES
from ksana_jax.core.processor import machine
from ksana_jax.devices.platforms import platform_of
from ksana_jax.native import build

# Code of these is known by their versions; the package's own by its files.
LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "ml_dtypes")
# Packages of ksana_jax that no program is traced through.
UNTRACED = ("assets", "cli", "engine", "extend", "lab", "loading", "serve", "tokenizers")
_SOURCES = (".py", ".cc", ".h", ".so")
# Settings of jax that no program depends on.
_IRRELEVANT = re.compile("cache|logging_level|traceback_filtering")
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(...))
_ENVIRONMENT = ("XLA_", "TF_", "LIBTPU_", "OMP_", "MKL_", "KSANA_HIDE")
_BY_REPR = (np.dtype, np.ufunc, range, slice, pathlib.PurePath, re.Pattern, jax.P, TypeVar)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)


_MEMBERS = (types.FunctionType, property, staticmethod, classmethod, int, float, str, tuple)


class NotStored(Exception):
    """A program cannot be stored; the message is the reason."""


class ForeignCode(NotStored):
    """It depends on code outside the package, of which not all is known."""


class Lowering(functools.partial):
    """A function that lowers a program when it is called.

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
    """Returns 64 hex digits of a program and the process that would trace it.

    Args:
      walk: may be shared by programs whose arguments live as long.

    Raises:
      NotStored: a value cannot be digested.
    """
    parts = [walk.process, walk(lowering.func), walk(dict(lowering.keywords)), *map(walk.shapes, lowering.args)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class Walk:
    """Digests values; objects met before are not walked again."""

    def __init__(self):
        self._known: dict[int, tuple[Any, bytes | None]] = {}
        self._shapes: dict[int, tuple[Any, bytes]] = {}
        self._abstract: dict[int, tuple[Any, Any]] = {}

    @functools.cached_property
    def process(self) -> bytes:
        """Digest of `_process`."""
        return self(_process())

    def shapes(self, tree: Any) -> bytes:
        """Digests a tree of arrays or of their shapes by what a program knows of them."""
        if id(tree) not in self._shapes:
            arrays, structure = jax.tree.flatten(tree)
            parts = self(structure), *map(self._array, arrays)
            self._shapes[id(tree)] = tree, hashlib.sha256(b"".join(parts)).digest()
        return self._shapes[id(tree)][1]

    def abstract(self, tree: Any) -> Any:
        """Returns a tree of arrays as one of their shapes, which lowers to the same program."""
        if id(tree) not in self._abstract:
            self._abstract[id(tree)] = tree, jax.tree.map(_shape, tree)
        return self._abstract[id(tree)][1]

    def _array(self, x: Any) -> bytes:
        if not isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray):
            raise NotStored(f"an argument is a {type(x).__name__}, no array")
        placed, is_shape = getattr(x, "sharding", None), isinstance(x, jax.ShapeDtypeStruct)
        fixed = is_shape or getattr(x, "committed", False)
        return self((type(x) is np.ndarray, x.shape, str(x.dtype), getattr(x, "weak_type", False), fixed, placed))

    def __call__(self, x: Any) -> bytes:
        if isinstance(x, _SCALARS) and type(x) in _SCALARS:
            return f"{type(x).__name__} {x!r}".encode()
        if id(x) not in self._known:
            self._known[id(x)] = x, None
            digest = hashlib.sha256(type(x).__qualname__.encode())
            try:
                for part in self._parts(x):
                    digest.update(len(part).to_bytes(8) + part)
            except BaseException:
                del self._known[id(x)]
                raise
            self._known[id(x)] = x, digest.digest()
        if (found := self._known[id(x)][1]) is None:
            raise NotStored(f"{type(x).__name__} contains itself")
        return found

    def _parts(self, x: Any) -> Iterator[bytes]:
        kind = type(x)
        if isinstance(x, property):
            yield from map(self, (x.fget, x.fset))
        elif isinstance(x, staticmethod | classmethod):
            yield self(x.__func__)
        elif isinstance(x, type) or isinstance(x, _FUNCTIONS) or hasattr(x, "__wrapped__"):
            yield from self._code(x)
        elif isinstance(x, functools.partial):
            yield from map(self, (x.func, x.args, x.keywords))
        elif isinstance(x, types.MethodType):
            yield from map(self, (x.__func__, x.__self__))
        elif isinstance(x, jax.Array):
            raise NotStored("it contains an array of the device")
        elif isinstance(x, np.ndarray | np.generic):
            if x.dtype.hasobject:
                raise NotStored("it contains an array of Python objects")
            yield from (str(x.dtype).encode(), repr(x.shape).encode(), x.tobytes())
        elif isinstance(x, _BY_REPR):
            yield repr(x).encode()
        else:
            yield self(kind)
            yield from self._contents(x)

    def _contents(self, x: Any) -> Iterator[bytes]:
        """Yields the digests of what an object contains."""
        if isinstance(x, enum.Enum):
            yield x.name.encode()
        elif isinstance(x, Mapping):
            yield from (self(part) for item in x.items() for part in item)
        elif isinstance(x, set | frozenset):
            yield from sorted(map(self, x))
        elif isinstance(x, list | tuple):
            yield from map(self, x)
            # Which items are one object, as programs share what such items make.
            items = [id(item) for item in x if dataclasses.is_dataclass(item)]
            yield repr([items.index(item) for item in items]).encode()
        elif isinstance(x, jax.Device):
            yield f"{x.platform} {x.device_kind} {x.id} {x.process_index} {x.client.platform_version}".encode()
        elif isinstance(x, jax.sharding.Mesh):
            yield from map(self, (x.axis_names, x.axis_types, x.devices.shape, list(x.devices.flat)))
        elif isinstance(x, jax.sharding.NamedSharding):
            yield from map(self, (x.mesh, tuple(x.spec), x.memory_kind))
        elif isinstance(x, jax.sharding.SingleDeviceSharding):
            yield from map(self, (list(x.device_set), x.memory_kind))
        elif isinstance(x, jax.tree_util.PyTreeDef):
            node = x.node_data()
            yield from (b"leaf",) if node is None and x.num_leaves else map(self, (node, x.children()))
        elif dataclasses.is_dataclass(x):
            yield from (self((field.name, getattr(x, field.name))) for field in dataclasses.fields(x))
        elif hasattr(x, "__dict__") and not hasattr(type(x), "__slots__"):
            derived = [name for name in vars(x) if isinstance(getattr(type(x), name, None), functools.cached_property)]
            yield from (self((name, value)) for name, value in sorted(vars(x).items()) if name not in derived)
        else:
            raise NotStored(f"it contains a {type(x).__module__}.{type(x).__qualname__}")

    def _code(self, x: Any) -> Iterator[bytes]:
        """Yields what identifies a class or function of the package or its libraries."""
        module, name = getattr(x, "__module__", None) or "builtins", getattr(x, "__qualname__", None) or x.__name__
        yield f"{module}:{name}".encode()
        if not _is_known(module):
            raise ForeignCode(f"{module}:{name} is code outside the package")
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is x or (module == "builtins" and isinstance(x, type)):
            return
        function = getattr(x, "__wrapped__", x)
        if isinstance(x, types.BuiltinFunctionType) and not isinstance(x.__self__, types.ModuleType | None):
            yield self(x.__self__)
        elif isinstance(function, types.FunctionType):
            code, cells = function.__code__, [cell.cell_contents for cell in function.__closure__ or ()]
            yield from map(self, (_code_of(code), cells, function.__defaults__, function.__kwdefaults__))
        else:
            raise NotStored(f"{module}:{name} is made at run time")


def _shape(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    sharding = x.sharding if getattr(x, "committed", False) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=getattr(x, "weak_type", False))


def _code_of(code: types.CodeType) -> tuple[Any, ...]:
    constants = tuple(_code_of(x) if isinstance(x, types.CodeType) else x for x in code.co_consts)
    return code.co_code, code.co_names, code.co_freevars, constants


def _is_known(module: str) -> bool:
    """True of modules of the package, of its libraries, and of Python."""
    top = module.partition(".")[0]
    made = top.startswith("namedtuple_")  # methods that `collections` gives a named tuple
    return made or top in PACKAGES or top in LIBRARIES or (top in sys.stdlib_module_names and top != "__main__")


def _process() -> tuple[Any, ...]:
    """Returns what programs depend on besides their own values: code, versions, machine, and settings of jax.

    Raises:
      NotStored: the package was edited after this process had started, or jax traces another function.
    """
    values = {name: repr(x) for name, x in jax.config.values.items() if not _IRRELEVANT.search(name)}
    context = []
    for x in jax_config.trace_context():
        if isinstance(x, AxisEnv):
            x = {name: repr(getattr(x, name)) for name in AxisEnv.__slots__ if name != "__weakref__"}
        context.append(repr(x))
    environment = {name: x for name, x in os.environ.items() if name.startswith(_ENVIRONMENT)}
    # An engine asks for the library before it chooses one of its functions.
    native = build.why_missing() or build.library().name if build.was_asked() else None
    found = sources(), _versions(), machine(), native, values, context, sorted(environment.items())
    return *found, jax.local_devices()[0], platform_of()


@functools.cache
def _versions() -> tuple[str, ...]:
    return sys.version, platform.platform(), *map(version, LIBRARIES)


@functools.cache
def sources() -> str:
    """Digests all source files of the package.

    Raises:
      NotStored: some are newer than this process, which may run the older ones.
    """
    if has_edits():
        raise NotStored("the package was edited after this process had started")
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(f"{path} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()


def has_edits() -> bool:
    """True if source files are newer than this process, which may run the older ones."""
    return any(path.stat().st_mtime >= started_s for path in source_files())


def source_files() -> list[pathlib.Path]:
    """Returns the source files of the package, in any language."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    folders = [pathlib.Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    files = (path for folder in folders for path in folder.rglob("*") if path.suffix in _SOURCES)
    return sorted(files)


def traced_modules() -> list[str]:
    """Returns the loaded modules of the package that programs may be traced through."""
    names = (name.split(".") for name in sys.modules)
    found = [".".join(n) for n in names if n[0] in PACKAGES and (len(n) == 1 or n[1] not in UNTRACED)]
    return sorted(found)


def bindings(modules: Iterable[str]) -> str:
    """Returns a digest of the functions, classes and constants in modules, which a process may have replaced.

    Raises:
      NotStored: some are code outside the package.
      ImportError: there is no such module.
    """
    walk, digest = Walk(), hashlib.sha256()
    for module in modules:
        digest.update(_bindings(module, vars(sys.modules.get(module) or importlib.import_module(module)), walk))
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
