"""Descriptions of a dataclass's fields, read from its docstring. A leaf that every module may import."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any


def field_meanings(cls: Any) -> dict[str, str]:
    """Returns the descriptions of a dataclass's fields in its own and its bases' docstrings, by field.

    They are lines "name: text" or "name, name: text", continued to the next such or blank line.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        current: tuple[str, ...] = ()
        for line in inspect.cleandoc(base.__doc__ or "").splitlines():
            match = re.match(r"\s*((?:\w+, )*\w+): (.*)", line)
            begins = tuple(match[1].split(", ")) if match else ()
            if match and names.issuperset(begins):
                current = begins
                found |= dict.fromkeys(current, match[2])
            elif not line.strip():
                current = ()
            else:
                found |= {name: f"{found[name]} {line.strip()}" for name in current}
    return found
