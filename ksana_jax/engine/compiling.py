"""Ahead-of-time compilation that says what it compiles. Knows no steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("ksana_jax")


def compiled(key: Any, lower: Callable[[], Any]) -> Callable:
    """Traces and compiles a function, and logs its key and the seconds that each took.

    Args:
      key: what the function is kept under, such as a `StepShape`.
      lower: traces it; returns a `jax.stages.Lowered`.
    """
    began = time.perf_counter()
    lowered = lower()
    traced = time.perf_counter()
    function = lowered.compile()
    logger.info("compiled %s in %.2f s, traced in %.2f s", key, time.perf_counter() - traced, traced - began)
    return function
