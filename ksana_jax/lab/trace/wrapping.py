"""Wraps methods of an engine's parts, for observers that need more than the engine reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ksana_jax.engine.engine import Engine


class Wrappers:
    """Wrapped methods of one engine's parts; holds no reference to the engine.

    A wrapper is called as wrapper(method, *args) instead of method(*args).
    """

    def __init__(self) -> None:
        self._places: list[tuple[str, str]] = []
        self._active = True

    def add(self, engine: Engine, part: str, name: str, wrapper: Callable[..., Any]) -> None:
        """Wraps the method `name` of `engine.part`, or of the engine itself if `part` is empty."""
        owner = getattr(engine, part) if part else engine
        method = getattr(owner, name)

        def wrapped(*args: Any, **given: Any) -> Any:
            return wrapper(method, *args, **given) if self._active else method(*args, **given)

        wrapped.belongs_to = self  # pyright: ignore[reportFunctionMemberAccess]
        wrapped.method = method  # pyright: ignore[reportFunctionMemberAccess]
        setattr(owner, name, wrapped)
        self._places.append((part, name))

    def remove(self, engine: Engine) -> None:
        """Removes the wrappers; one that was wrapped again stays and does nothing."""
        self._active = False
        for part, name in reversed(self._places):
            owner = getattr(engine, part) if part else engine
            mine: Any = vars(owner).get(name)
            if getattr(mine, "belongs_to", None) is self:
                delattr(owner, name)
                if not hasattr(mine.method, "__self__"):  # a wrapper of another
                    setattr(owner, name, mine.method)
        self._places.clear()
