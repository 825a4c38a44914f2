"""The choice of a step's tokens whose mask follows from tokens of the step before, which still runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ksana_jax.runner.transfer import Fetched, Packing


class LateChoice:
    """Starts when its tokens are waited for, or when the next step, which takes them, is submitted: by then the step
    before has been settled. Meanwhile the device computes layers.

    Args:
      choose: takes a mask; returns tokens [J] and a vector of `report_packing`. mask: see `StepInput`.
    """

    def __init__(self, choose: Callable[[Any], tuple[Any, Any]], mask: Callable[[], Any], packing: Packing):
        self._choose, self._mask, self._packing = choose, mask, packing

    @functools.cached_property
    def chosen(self) -> tuple[Any, Fetched]:
        """The tokens [J] on the device, and on their way to the host."""
        tokens, report = self._choose(self._mask())
        return tokens, Fetched(report, self._packing)

    def result(self) -> Any:
        """Waits for the tokens; see `Fetched.result`."""
        return self.chosen[1].result()
