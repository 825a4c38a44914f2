"""Distributions of lengths in tokens: constant, uniform, lognormal. Knows no requests."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError

_P99 = statistics.NormalDist().inv_cdf(0.99)
# Longer than any text; keeps the tail of a wide distribution within an int32.
LONGEST = 10**8

# Draws lengths, [count] int64, each at least 1.
Lengths = Callable[[np.random.Generator, int], np.ndarray]


def _lognormal(mu: float, sigma: float) -> Lengths:
    """Returns the distribution of exp(mu + sigma x), x standard normal, rounded."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        lengths = np.exp(np.minimum(mu + sigma * rng.standard_normal(count), math.log(LONGEST)))
        return np.maximum(np.rint(lengths).astype(np.int64), 1)

    return draw


def read_lengths(name: str, setting: Any) -> Lengths:
    """Returns the distribution that a setting describes.

    Args:
      setting: an integer; [low, high], uniform with both ends; {p50: 1020, p99: 4142} or {mu: 6.9, sigma: 0.6},
        lognormal.

    Raises:
      ConfigError: it is none of these, or a number is out of range.
    """
    if checks.is_integer(setting):
        checks.require(checks.integer(name, setting, 1, LONGEST), error=ConfigError)
        return lambda rng, count: np.full(count, setting)
    if isinstance(setting, Sequence) and not isinstance(setting, str) and len(setting) == 2:
        low, high = setting
        checks.require(
            checks.integer(f"{name}: low", low, 1, LONGEST),
            checks.integer(f"{name}: high", high, low if checks.is_integer(low) else 1, LONGEST),
            error=ConfigError,
        )
        return lambda rng, count: rng.integers(low, high + 1, count)
    if isinstance(setting, Mapping) and set(setting) == {"p50", "p99"}:
        p50, p99 = setting["p50"], setting["p99"]
        checks.require(checks.number(f"{name}: p50", p50, 1, LONGEST), error=ConfigError)
        checks.require(checks.number(f"{name}: p99", p99, p50, LONGEST), error=ConfigError)
        return _lognormal(math.log(p50), math.log(p99 / p50) / _P99)
    if isinstance(setting, Mapping) and set(setting) == {"mu", "sigma"}:
        mu, sigma = setting["mu"], setting["sigma"]
        limit = math.log(LONGEST)
        checks.require(
            checks.number(f"{name}: mu", mu, 0, limit), checks.number(f"{name}: sigma", sigma, 0, 10), error=ConfigError
        )
        return _lognormal(mu, sigma)
    raise ConfigError(
        f"{name} is {checks.shown(setting)}, must be an integer, [low, high], {{p50: ..., p99: ...}} or "
        "{mu: ..., sigma: ...}"
    )
