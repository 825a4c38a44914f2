"""Fits a model of costs to the records of an engine's steps. NumPy and scipy; no jax."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ksana_jax.core.errors import ConfigError
from ksana_jax.core.metrics import StepRecord
from ksana_jax.lab.simulator.cost import HostCost
from ksana_jax.lab.simulator.fitted import DECODE, FEATURES, FittedCost, ShapeTimes, features, phase_of
from ksana_jax.lab.simulator.move_cost import fit_moves
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.lab.simulator.step_times import device_seconds, sizes_of, usable

# Minimum steps of a phase, and the share of them held out for the error.
MIN_STEPS, HELD_OUT = 200, 0.2
# Steps of a shape from which it has a factor of its own, and most values of its residuals.
MIN_OF_SHAPE, MOST_RESIDUALS = 5, 50


def fit(
    records: Sequence[StepRecord], about: Mapping[str, Any] | None = None, *, method: str = "affine", seed: int = 0
) -> FittedCost:
    """Fits costs to recorded steps.

    Steps that compiled, moved blocks or were the first of their shape are left out. Phases are fitted by non-negative
    least squares on relative errors, and so are moves, to the times that were measured of moves alone (`move_times`).

    Args:
      about: the engine and its machine, as the header of a recording has them; "moves" are the measured moves.
      method: see `FittedCost`. seed: of the choice of the steps that are held out.

    Raises:
      ConfigError: several steps shared a call, so that the time of one is unknown; or a phase has too few steps.
    """
    about = about or {}
    if about.get("config", {}).get("num_scheduler_steps", 1) > 1:
        raise ConfigError("num_scheduler_steps is above 1: steps of one call have no times of their own")
    alone = usable(records)
    measured = _measured(records, alone)
    still = [(size, seconds) for size, seconds in measured if not _moves(size)]
    by_phase: dict[str, list[tuple[StepSize, float]]] = {}
    for size, seconds in still:
        by_phase.setdefault(phase_of(size), []).append((size, seconds))
    phases, errors = {}, {}
    for phase, found in sorted(by_phase.items()):
        if len(found) < MIN_STEPS:
            raise ConfigError(
                f"{len(found)} {phase} steps of {len(records):,} can be used, {MIN_STEPS} are needed: those that "
                "compile, or are the first of their shape, are left out"
            )
        phases[phase] = _affine(found)
        errors[phase] = _held_out(found, method, seed)
    if not phases:
        raise ConfigError(f"none of {len(records):,} steps can be used: each compiled or was first of its shape")
    shapes = _shapes(still, phases)
    host, num_host = _host(records, alone)
    moved = about.get("moves", [])
    provenance = {
        "measured": True,
        "fitted": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "num_steps": {"recorded": len(records), "used": len(still), "host": num_host},
        "held_out": errors,
        "moves": f"measured: {len(moved):,}" if moved else "not measured: the engine had one tier, they take no time",
        "steps": {name: value for name, value in about.items() if name != "moves"},
    }
    return FittedCost(
        method=method, phases=phases, shapes=shapes, host=host, move=fit_moves(moved), provenance=provenance
    )


def _measured(records: Sequence[StepRecord], alone: Sequence[bool]) -> list[tuple[StepSize, float]]:
    """Returns sizes and seconds of the steps from which costs are fitted; see `chunk_seconds`."""
    sizes, seconds, late = sizes_of(records), device_seconds(records), before_chunks(records)
    clean = [
        (size, s)
        for size, s, ok, is_late in zip(sizes, seconds, alone, late, strict=True)
        if ok and not is_late and s > 0 and phase_of(size) == DECODE and not _moves(size)
    ]
    if len(clean) < MIN_STEPS:
        late = [False] * len(records)
    else:
        phases = {DECODE: _affine(clean)}
        decode = FittedCost(phases=phases, shapes=_shapes(clean, phases))
        seconds = chunk_seconds(records, seconds, sizes, decode.seconds)
    return [
        (size, s)
        for size, s, ok, is_late in zip(sizes, seconds, alone, late, strict=True)
        if ok and s > 0 and (not is_late or phase_of(size) != DECODE)
    ]


def _moves(size: StepSize) -> bool:
    return bool(size.num_saved or size.num_copied or size.num_loaded)


def _affine(found: Sequence[tuple[StepSize, float]]) -> dict[str, float]:
    x = np.array([list(features(size).values()) for size, _ in found])
    seconds = np.array([s for _, s in found])
    return dict(zip(FEATURES, _relative_nnls(x, seconds), strict=True))


def _relative_nnls(x: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Returns non-negative coefficients [n] that minimise the relative errors of x [m, n] @ coefficients."""
    scale = np.maximum(x.max(axis=0), 1e-30)  # columns of equal size, for the solver's sake
    found, _ = nnls(x / scale / seconds[:, None], np.ones(len(x)))
    return (found / scale).tolist()


def _shapes(found: Sequence[tuple[StepSize, float]], phases: Mapping[str, Mapping[str, float]]) -> list[ShapeTimes]:
    """Returns the times of each shape, in the order of their first steps."""
    plain = FittedCost(phases=phases, shapes=[])
    groups: dict[Any, list[tuple[StepSize, float]]] = {}
    for size, seconds in found:
        groups.setdefault(size.shape, []).append((size, seconds))
    shapes = []
    for shape, steps in groups.items():
        seconds = np.array([s for _, s in steps])
        mean_s, affine_s = float(seconds.mean()), np.array([plain.seconds(size) for size, _ in steps])
        factor, residuals = 1.0, np.zeros(0)
        if len(steps) >= MIN_OF_SHAPE:
            factor, residuals = float(seconds.sum() / affine_s.sum()), _quantiles(seconds / affine_s)
            residuals /= residuals.mean()
        shapes.append(ShapeTimes(shape, len(steps), mean_s, factor, tuple(residuals.tolist())))
    return shapes


def _quantiles(values: np.ndarray) -> np.ndarray:
    """Returns equally probable values: all, or as many quantiles as are kept, which cuts off the tails."""
    count = min(len(values), MOST_RESIDUALS)
    return np.quantile(values, (np.arange(count) + 0.5) / count)


def _held_out(found: Sequence[tuple[StepSize, float]], method: str, seed: int) -> dict[str, float]:
    """Fits four fifths of the steps of a phase; returns the relative errors on the rest."""
    order = np.random.default_rng(seed).permutation(len(found))
    split = int(len(found) * HELD_OUT)
    test, train = [found[i] for i in order[:split]], [found[i] for i in order[split:]]
    phases = {phase_of(train[0][0]): _affine(train)}
    model = FittedCost(method=method, phases=phases, shapes=_shapes(train, phases))
    errors = np.array([model.seconds(size) / seconds - 1 for size, seconds in test])
    total = sum(model.seconds(size) for size, _ in test) / sum(seconds for _, seconds in test) - 1
    return {
        "num_steps": len(test),
        "mape": float(np.abs(errors).mean()),
        "median_absolute_error": float(np.median(np.abs(errors))),
        "error_of_the_sum": float(total),
    }


def _host(records: Sequence[StepRecord], alone: Sequence[bool]) -> tuple[HostCost, int]:
    """Fits the host's seconds to the rows of steps, and to whether they have chunks."""
    found = [
        (1, record.num_decodes + record.num_chunks, record.num_chunks > 0, record.schedule_s + before.report_s)
        for before, record, ok in zip(records, records[1:], alone[1:], strict=False)
        if ok
    ]
    if not found:
        return HostCost(), 0
    *x, seconds = np.array(found).T
    return HostCost(*_relative_nnls(np.stack(x, axis=1), np.maximum(seconds, 1e-9))), len(found)


def before_chunks(records: Sequence[StepRecord]) -> list[bool]:
    """Returns for each step whether the one after it has chunks."""
    return [*(record.num_chunks > 0 for record in records[1:]), False][: len(records)]


def chunk_seconds(
    records: Sequence[StepRecord],
    seconds: Sequence[float],
    sizes: Sequence[StepSize],
    decode: Callable[[StepSize], float],
) -> list[float]:
    """Returns the seconds of steps; a chunk's include its time that the decode step before it was charged.

    The host sees a step's result only when it has submitted the next one, and that one may already use the processor:
    on a CPU with two cores, a decode step before a chunk is seen to take three times as long as others, and the chunk
    less than it does alone. Decode steps are therefore timed where no chunk follows; chunks together with the step
    before them, minus the time that step takes elsewhere.

    Args:
      seconds: as measured. decode: returns the seconds of a decode step alone.
    """
    found = list(seconds)
    first = 0
    while first < len(records):
        last = first
        while last < len(records) and records[last].num_chunks:
            last += 1
        before = first - 1
        # Only a step that was submitted while the one before it ran has any of its time.
        if last > first > 0 and records[first].began_s < records[before].ended_s:
            total = sum(seconds[first:last])
            scale = max(total + seconds[before] - decode(sizes[before]), 0.0) / total if total else 1.0
            found[first:last] = [s * scale for s in seconds[first:last]]
        first = max(last, first + 1)
    return found
