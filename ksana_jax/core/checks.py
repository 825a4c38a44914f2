"""Checks of settings with one wording, "NAME is VALUE, must be ...". A leaf that every module may import.

Each check returns the problem that it finds, or None; `require` raises the first problem.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any


def require(*problems: str | None, error: type[ValueError] = ValueError) -> None:
    """Raises the first problem, if there is one.

    Raises:
      ValueError: or the type given as `error`.
    """
    for problem in problems:
        if problem is not None:
            raise error(problem)


def is_integer(value: Any) -> bool:
    """True if a value is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """True if a value is an integer or a finite float."""
    return is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def are_integers(values: Collection[Any], low: int, high: int) -> bool:
    """True if all values are ints from low to high. Much faster than `integer` for each."""
    return set(map(type, values)) <= {int} and (not values or low <= min(values) <= max(values) <= high)


def integer(name: str, value: Any, low: int = 1, high: int | None = None, *, optional: bool = False) -> str | None:
    """Returns the problem with a setting that must be an integer in a range, or None.

    Args:
      low, high: inclusive bounds. optional: whether None is allowed.
    """
    if (optional and value is None) or (is_integer(value) and low <= value and (high is None or value <= high)):
        return None
    limit = "" if high is None else f" to {high:,}"
    return f"{name} is {shown(value)}, must be an integer from {low:,}{limit}{' or None' * optional}"


def number(
    name: str,
    value: Any,
    low: float | None = None,
    high: float = math.inf,
    *,
    above: float | None = None,
    below: float = math.inf,
    optional: bool = False,
) -> str | None:
    """Returns the problem with a setting that must be a finite number in a range, or None.

    Args:
      low, high: inclusive bounds. above, below: exclusive bounds. optional: whether None is allowed.
    """
    if optional and value is None:
        return None
    if is_number(value) and (low is None or value >= low) and (above is None or value > above):
        if value <= high and value < below:
            return None
    limits = [f"from {_limit(low)}"] if low is not None else []
    limits += [f"above {_limit(above)}"] if above is not None else []
    limits += [f"{'to' if low is not None else 'at most'} {_limit(high)}"] if high < math.inf else []
    limits += [f"below {_limit(below)}"] if below < math.inf else []
    joint = " " if low is not None and high < math.inf else " and "
    kind = "a number" if min(high, below) < math.inf else "a finite number"
    return f"{name} is {shown(value)}, must be {kind}{' ' * bool(limits)}{joint.join(limits)}{' or None' * optional}"


def one_of(name: str, value: Any, allowed: Collection[Any]) -> str | None:
    """Returns the problem with a setting that must be one of some values, or None."""
    try:
        found = value in allowed
    except TypeError:  # a list or mapping, which has no hash, among the keys of a mapping
        found = False
    return None if found else f"{name} is {shown(value)}, must be one of {', '.join(map(str, allowed))}"


def boolean(name: str, value: Any) -> str | None:
    """Returns the problem with a setting that must be True or False, or None."""
    return None if isinstance(value, bool) else f"{name} is {shown(value)}, must be True or False"


def _limit(value: float) -> str:
    """Formats a limit, which settings of integers and of floats share: 1e4 is 10,000."""
    return shown(value) if is_integer(value) else f"{value:,.12g}"


def shown(value: Any) -> str:
    """Formats a value for an error message: digits in groups, long values truncated."""
    if is_integer(value):
        return f"{value:,}" if abs(value) < 10**40 else f"an integer of {value.bit_length():,} bits"
    text = f"{value:,}" if is_number(value) and abs(value) >= 1e4 else repr(value)  # 95,178.0 is no integer
    return text if len(text) <= 80 else text[:77] + "..."
