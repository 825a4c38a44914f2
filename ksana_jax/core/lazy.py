"""Imports the public names of a package on first use, so that `import ksana_jax` does not import jax."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, public: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package.

    Args:
      package: the package's `__name__`. public: {module: the names that it defines, separated by spaces}.
    """
    modules = {name: module for module, names in public.items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name in modules:
            return getattr(import_module(modules[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return __getattr__, __dir__
