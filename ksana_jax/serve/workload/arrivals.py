"""Times at which requests arrive: constant gaps, a Poisson process, or bursts. Knows no requests."""

from __future__ import annotations

import numpy as np

from ksana_jax.serve.workload.tokens import key_of


def generator(seed: int, what: str) -> np.random.Generator:
    """Returns the generator of one quantity, so that drawing more of another does not change it."""
    return np.random.default_rng([seed, key_of(what)])


def unit_gaps(seed: int, count: int, cv: float) -> np.ndarray:
    """Draws gaps between arrivals with a mean of 1, [count] float64.

    Args:
      cv: coefficient of variation of the gamma distribution from which they are drawn, of shape 1 / cv**2: 0 gives
        constant gaps, 1 a Poisson process, more bursts. (The --burstiness of other benchmarks is the shape.)

    The gaps are divided by their mean: all seeds offer the same load, also if bursts make the mean of a few gaps vary.
    """
    if cv == 0:
        return np.ones(count)
    gaps = generator(seed, "gaps").gamma(1 / cv**2, size=count)
    # A small shape gives gaps that underflow to 0; a few may all do so.
    return gaps / gaps.mean() if gaps.any() else np.ones(count)


def arrivals(seed: int, count: int, rate: float | None, cv: float) -> np.ndarray:
    """Returns when `count` requests arrive, [count] seconds from 0; all at 0 if the rate is None.

    Args:
      rate: arrivals per second. cv: see `unit_gaps`.
    """
    if rate is None:
        return np.zeros(count)
    return np.concatenate([[0.0], np.cumsum(unit_gaps(seed, count - 1, cv))])[:count] / rate
