"""Findings of a device check. Knows no jax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
      what: the operation tried.
      works: whether it works; None for facts that are neither good nor bad.
      detail: the observation, or the error.
      without: the engine's fallback if it does not work; empty if it cannot run then.
    """

    what: str
    works: bool | None
    detail: str = ""
    without: str = ""


def tried(what: str, check: Callable[[], object], without: str = "") -> Finding:
    """Runs a check, which returns a detail or raises whatever its device raises."""
    try:
        detail = check()
    except Exception as error:  # any error of a plugin
        return Finding(what, False, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300], without)
    return Finding(what, True, "" if detail is None else str(detail), without)
