"""Which parameters of a test are left to `make soak`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def soak_unless(keep: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: tuples are several, and those not kept are marked as soak."""
    return [pytest.param(*(v if type(v) is tuple else (v,)), marks=() if keep(v) else pytest.mark.soak) for v in values]
