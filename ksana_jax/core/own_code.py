"""Finds classes outside the package that settings name as "package.module:name", and digests their source.

Imports none of them. Data that own code reads is not part of its digest.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import secrets
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.plugins import own_folders

# Top-level names of the package's own code.
PACKAGES = ("ksana_jax", "pallas_kernels")
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_STDLIB = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")
# {name: (the object it named when its source was first read, digest of that source)}
_first: dict[str, tuple[Any, str]] = {}


def texts(setting: Any) -> Iterator[str]:
    """Yields all texts in a setting: mappings' values and lists' items, however deep."""
    if isinstance(setting, str):
        yield setting
    elif isinstance(setting, Mapping):
        for value in setting.values():
            yield from texts(value)
    elif isinstance(setting, (list, tuple)):
        for value in setting:
            yield from texts(value)


def names_code(text: str) -> bool:
    """True if a text has the form "package.module:name"."""
    return _NAME.fullmatch(text) is not None


def is_own(name: str) -> bool:
    """True if a text has the form "package.module:name" and does not name the package's own code."""
    return names_code(name) and name.partition(".")[0].partition(":")[0] not in PACKAGES


def digests_of(setting: Any) -> dict[str, str]:
    """Returns {name: digest} of all own code that a setting names, as far as it has source.

    Raises:
      ConfigError: source was edited after this process had imported it.
    """
    found = {name: digest_of(name) for name in sorted({text for text in texts(setting) if is_own(text)})}
    return {name: digest for name, digest in found.items() if digest is not None}


def digest_of(name: str) -> str | None:
    """Returns 16 hex digits of a class's module and of the user's modules that it imports, all by their source without
    comments and docstrings; None if there is no such module outside Python's library.

    Code without a file, as in a notebook, gets another digest each time: what it was is not known afterwards.

    Raises:
      ConfigError: see `digests_of`.
    """
    module, _, path = name.partition(":")
    if module in sys.modules and not hasattr(sys.modules[module], "__file__"):
        return None if module in sys.stdlib_module_names else secrets.token_hex(8)
    if module.partition(".")[0] in sys.stdlib_module_names or (sources := _sources(module)) is None:
        return None
    digest = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()[:16]
    code: Any = sys.modules.get(module)
    for part in path.split(".") if code is not None else ():
        code = getattr(code, part, None)
    before = _first.get(name)
    if before is None or before[0] is not code:
        _first[name] = code, digest
    elif before[1] != digest:
        raise ConfigError(
            f"{name}: its source was edited after this process had imported it: start a new one, this one has the old"
        )
    return digest


def digest_of_module(module: str) -> str:
    """Returns 16 hex digits of one module's source without comments and docstrings."""
    path = _file_of(module)
    assert path is not None
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size)[0]


def _sources(module: str) -> dict[str, str] | None:
    """Returns {module: digest of its source} for a module and the user's own that it imports, in any depth."""
    found: dict[str, str] = {}
    waiting, top = [module], module.partition(".")[0]
    seen = set(waiting)
    while waiting:
        name = waiting.pop()
        path = _file_of(name)
        if path is None or not _is_users(path, name, top):
            continue
        state = path.stat()
        found[name], imported = _read(path, state.st_mtime_ns, state.st_size)
        parents = [".".join(name.split(".")[: i + 1]) for i in range(name.count("."))]
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for other in (*parents, *(_absolute(other, package) for other in imported)):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return found if module in found else None


def _file_of(module: str) -> Path | None:
    """Returns a module's file; of a module that is not imported yet, without importing it or its parents."""
    if (loaded := sys.modules.get(module)) is not None:
        return None if (file := getattr(loaded, "__file__", None)) is None else Path(file)
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) or PathFinder.find_spec(top, own_folders())
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    for part in rest:
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
        if spec is None:
            return None
    return Path(spec.origin) if spec.origin and os.path.isfile(spec.origin) else None


def _is_users(path: Path, module: str, top: str) -> bool:
    """True of a file that a user may edit; of an installed package only the one that a setting names."""
    if module.partition(".")[0] in PACKAGES:
        return False
    if set(path.parts) & set(_INSTALLED):
        return module.partition(".")[0] == top
    return not any(path.is_relative_to(folder) for folder in _STDLIB)


@functools.lru_cache(4096)
def _read(path: Path, mtime_ns: int, size: int) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Returns a digest of a source file without comments and docstrings, and (level, name) of what it imports."""
    content, imported = path.read_bytes(), []
    try:
        tree = ast.parse(content)
        for node in ast.walk(tree):
            if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
            if isinstance(node, ast.Import):
                imported += [(0, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = [node.module] if node.module else []
                names = [base, *([*base, alias.name] for alias in node.names)]
                imported += [(node.level, ".".join(name)) for name in names if name]
        content = ast.unparse(tree).encode()
    except (SyntaxError, ValueError, RecursionError):  # compiled code, or source that Python cannot read
        pass
    return hashlib.sha256(content).hexdigest()[:16], tuple(dict.fromkeys(imported))


def _absolute(imported: tuple[int, str], package: str) -> str:
    level, name = imported
    parts = package.split(".")[: package.count(".") + 2 - level] if level else []
    return ".".join([*parts, name])
