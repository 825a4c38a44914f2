"""Budgets of layers or KV heads that follow from the data, rounded to whole intervals. NumPy only."""

from __future__ import annotations

import numpy as np

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.patterns import FAR
from ksana_jax.core.plugins import line_of, name_of
from ksana_jax.kv.eviction.schedule import EvictionSchedule


def measured_budgets(schedule: EvictionSchedule, measured: np.ndarray, num_prompt: int) -> np.ndarray:
    """Returns the budgets [Gk] of a row whose prompt is complete, by what its method measured; FAR as in
    `EvictionSchedule.budgets`.

    Args:
      measured: [n, Lg, K, ...] of the n groups that evict, of one layer or KV head each.

    Raises:
      ConfigError: the method returns no number for each of them.
    """
    method, equal = schedule.method, schedule.budgets(np.array([num_prompt]))[:, 0]
    evicts, name = equal < FAR, f"kv_eviction {name_of(type(method))}: budgets"
    found, kept = equal.copy(), num_prompt - schedule.evictions(np.array([num_prompt]), equal[:, None])[0][:, 0]
    mean, of_layers = int(kept[evicts][0]), measured[:, 0]
    if method.per_head:
        of_layers = of_layers.reshape(-1, schedule.heads_apart, *of_layers.shape[2:])
    try:
        wanted = np.asarray(method.budgets(of_layers, mean, num_prompt), np.float64)
    except Exception as error:  # whatever a user's method may raise
        place, (said, *_) = line_of(error, type(method).__module__), str(error).splitlines() or [""]
        raise ConfigError(f"{name}{place}: {type(error).__name__}: {said}") from None
    shape = of_layers.shape[: 1 + method.per_head]
    if wanted.shape != shape or not np.isfinite(wanted).all():
        raise ConfigError(
            f"{name} returns {wanted.tolist()}, must be finite numbers of shape {shape} for {num_prompt:,} tokens"
        )
    recent = int(schedule.num_recent(equal[evicts][:1, None])[0, 0])
    least = min(mean, method.sinks + max(recent, 1))
    found[evicts] = num_prompt - schedule.interval * _intervals(
        (num_prompt - wanted.ravel()) / schedule.interval,
        (num_prompt - least) // schedule.interval,
        (num_prompt - mean) // schedule.interval * len(wanted.ravel()),
    )
    return found


def _intervals(wanted: np.ndarray, most: int, total: int) -> np.ndarray:
    """Returns whole numbers from 0 to `most` whose sum is `total`, as near to wanted numbers [n] as possible; of equal
    ones the first are larger."""
    found = np.clip(np.floor(wanted), 0, most).astype(np.int64)
    while more := np.sign(total - found.sum()):
        lacks = np.where(found < most if more > 0 else found > 0, more * (wanted - found), -np.inf)
        found[np.flatnonzero(lacks == lacks.max())[0 if more > 0 else -1]] += more
    return found
