"""Frozen dataclasses that JAX takes as trees of arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, dataclass_transform

import jax


def static(**given: Any) -> Any:
    """Returns a field that is part of the tree's structure, not one of its children; arguments of `dataclasses.field`.
    Its value must be hashable."""
    return dataclasses.field(metadata={"static": True}, **given)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: Any = None, /, **given: Any) -> Any:
    """Makes a class a frozen dataclass and a pytree, with a method `replace(**changes)`; arguments of
    `dataclasses.dataclass`."""
    if cls is None:
        return functools.partial(pytree, **given)
    cls.replace = dataclasses.replace
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, **given)(cls))
