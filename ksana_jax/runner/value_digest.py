"""Digests of Python values, for keys of what is kept between processes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from ksana_jax.core.own_code import PACKAGES

# Code of these is known by their versions; the package's own by its files.
LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "ml_dtypes", "opt_einsum", "rich", "scipy")
_SCALARS = (type(None), bool, int, float, complex, str, bytes, type(...))
_BY_REPR = (np.dtype, np.ufunc, range, slice, pathlib.PurePath, re.Pattern, jax.P, TypeVar)
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
# What determines objects that have no other contents than this.
_CONTENTS: dict[type, Callable[[Any], Sequence[Any]]] = {
    functools.partial: lambda x: (x.func, x.args, x.keywords),
    types.MethodType: lambda x: (x.__func__, x.__self__),
    property: lambda x: (x.fget, x.fset),
    staticmethod: lambda x: (x.__func__,),
    classmethod: lambda x: (x.__func__,),
    jax.Device: lambda x: (x.platform, x.device_kind, x.id, x.process_index, x.client.platform_version),
    jax.sharding.Mesh: lambda x: (x.axis_names, x.axis_types, x.devices.shape, list(x.devices.flat)),
    jax.sharding.NamedSharding: lambda x: (x.mesh, x.spec, x.memory_kind),
    jax.sharding.SingleDeviceSharding: lambda x: (list(x.device_set), x.memory_kind),
    jax.tree_util.PyTreeDef: lambda x: (x.node_data(), x.num_leaves, x.children()),
}


class NotStored(Exception):
    """A value has no digest, so its programs are not stored; the message is the reason."""


class ForeignCode(NotStored):
    """It depends on code outside the package, of which not all is known."""


class Walk:
    """Digests values; those met before are not walked again."""

    def __init__(self):
        self._known: dict[int, tuple[Any, bytes | None]] = {}
        self._shapes: dict[int, tuple[Any, bytes]] = {}

    def shapes(self, tree: Any) -> bytes:
        """Digests a tree of `compiling.shape_of` arrays."""
        if id(tree) not in self._shapes:
            arrays, structure = jax.tree.flatten(tree)
            self._shapes[id(tree)] = tree, self([structure, *map(self._array, arrays)])
        return self._shapes[id(tree)][1]

    def _array(self, x: Any) -> bytes:
        return self((x.shape, str(x.dtype), x.weak_type, x.sharding))

    def __call__(self, x: Any) -> bytes:
        if type(x) in _SCALARS:
            return f"{type(x).__name__} {x!r}".encode()
        if id(x) not in self._known:
            self._known[id(x)] = x, None
            digest = hashlib.sha256()
            try:
                for part in self._parts(x):
                    digest.update(len(part).to_bytes(8) + part)
            except BaseException:
                del self._known[id(x)]
                raise
            self._known[id(x)] = x, digest.digest()
        if (found := self._known[id(x)][1]) is None:
            raise NotStored(f"a {type(x).__name__} contains itself")
        return found

    def _parts(self, x: Any) -> Iterator[bytes]:
        if isinstance(x, _CODE) or hasattr(x, "__wrapped__"):
            yield from self._code(x)
            return
        yield self(type(x))
        if isinstance(x, _BY_REPR):
            yield repr(x).encode()
        elif isinstance(x, enum.Enum):
            yield x.name.encode()
        elif isinstance(x, np.ndarray | np.generic) and not x.dtype.hasobject:
            yield f"{x.dtype} {x.shape}".encode() + x.tobytes()
        elif isinstance(x, Mapping):
            yield from (self(part) for item in x.items() for part in item)
        elif isinstance(x, set | frozenset):
            yield from sorted(map(self, x))
        elif isinstance(x, list | tuple):
            yield from map(self, x)
            # Which items are one object: programs share what such items make.
            items = [id(item) for item in x if dataclasses.is_dataclass(item) or hasattr(item, "_fields")]
            yield repr([items.index(item) for item in items]).encode()
        else:
            yield from map(self, _contents(x))

    def _code(self, x: Any) -> Iterator[bytes]:
        """Yields what identifies a class or function of the package or its libraries."""
        module, name = getattr(x, "__module__", None) or "builtins", getattr(x, "__qualname__", "?")
        yield f"{type(x).__name__} {module}:{name}".encode()
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
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            yield from map(self, (_code_of(function.__code__), cells, function.__defaults__, function.__kwdefaults__))
        else:
            raise NotStored(f"{module}:{name} is made at run time")


def _contents(x: Any) -> Sequence[Any]:
    """Returns the values that determine an object."""
    for kind, contents in _CONTENTS.items():
        if isinstance(x, kind):
            return contents(x)
    if isinstance(x, jax.Array) or not hasattr(x, "__dict__"):
        raise NotStored(f"it contains a {type(x).__module__}.{type(x).__qualname__}")
    names = {*vars(x), *getattr(x, "__dataclass_fields__", ())}
    derived = {name for name in vars(x) if isinstance(getattr(type(x), name, None), functools.cached_property)}
    return [(name, getattr(x, name)) for name in sorted(names - derived)]


def _code_of(code: types.CodeType) -> tuple[Any, ...]:
    constants = tuple(_code_of(x) if isinstance(x, types.CodeType) else x for x in code.co_consts)
    return code.co_code, code.co_names, code.co_freevars, constants


def _is_known(module: str) -> bool:
    """True of modules of the package, of its libraries, and of Python."""
    top = module.partition(".")[0]
    made = top.startswith("namedtuple_")  # methods that `collections` gives a named tuple
    return made or top in PACKAGES or top in LIBRARIES or (top in sys.stdlib_module_names and top != "__main__")
