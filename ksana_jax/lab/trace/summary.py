"""Summary of a trace: its time by part, padding by bucket, and compilations. Plain numbers; knows no engine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ksana_jax.lab.trace.functions import CompiledFunction, name_of
from ksana_jax.lab.trace.steps import PHASES, StepTrace
from ksana_jax.models.flops import StepFlops
from ksana_jax.scheduler.step.types import StepShape


def summary(steps: Sequence[StepTrace], parts: Mapping[str, float], flops: StepFlops) -> dict[str, Any]:
    """Summarises the steps of one engine as plain values.

    padding: fraction of all tokens that were padding. padding_s: the same fraction of each step's time on the device,
    an upper bound for the cost of padding, since attention skips it. median_ms: of the timed_steps, see `_timed`; None
    without any. device_idle: fraction of the time with work when the device had
    nothing to do, at least; of the same steps. flops: operations by definition, with full attention. buckets: the steps
    by shape, those that took the most time on the device first.

    Args:
      parts: seconds of each part of the model in the profiled steps. flops: of the model's steps.
    """
    timed = _timed(steps)
    shapes: dict[StepShape, list[StepTrace]] = {}
    for step in steps:
        shapes.setdefault(step.record.shape, []).append(step)
    buckets = [{"name": name_of(shape), **_totals(some, timed, flops)} for shape, some in shapes.items()]
    clean = [s for s in steps if id(s) in timed]
    idle_s, device_s = sum(s.idle_s for s in clean), _seconds(clean, "device")
    return {
        **_totals(steps, timed, flops),
        "padding_s": sum(bucket["padding"] * bucket["device_s"] for bucket in buckets),
        "seconds": steps[-1].ended_s - steps[0].began_s if steps else 0.0,
        "device_idle": idle_s / (idle_s + device_s) if clean else None,
        "profiled_steps": sum(s.profiled for s in steps),
        "compiling_steps": sum(bool(s.functions) for s in steps),
        "time_s": _time_of_steps(steps, parts),
        "profiled_s": dict(parts),
        "buckets": sorted(buckets, key=lambda bucket: -bucket["device_s"]),
    }


def _timed(steps: Sequence[StepTrace]) -> set[int]:
    """Returns the ids of the steps whose times are their own: without the profiler, and without a compilation in them
    or in the next step, which may have been compiled while they waited."""
    delayed = [bool(step.functions) for step in steps]
    following = [*delayed[1:], False]
    return {id(s) for s, now, later in zip(steps, delayed, following, strict=False) if not (now or later or s.profiled)}


def _totals(steps: Sequence[StepTrace], timed: Set[int], flops: StepFlops) -> dict[str, Any]:
    clean = [s.ended_s - s.began_s for s in steps if id(s) in timed]
    computed, padded = sum(s.record.num_tokens for s in steps), sum(s.record.shape.num_tokens for s in steps)
    return {
        "num_steps": len(steps),
        "num_tokens": computed,
        "padded_tokens": padded,
        "padding": 1 - computed / padded if padded else 0.0,
        "timed_steps": len(clean),
        "median_ms": 1e3 * statistics.median(clean) if clean else None,
        "device_s": _seconds(steps, "device"),
        "flops": sum(flops.count(r.num_tokens, r.num_attended, r.num_sampled) for r in (s.record for s in steps)),
    }


def _seconds(steps: Sequence[StepTrace], phase: str) -> float:
    return sum(step.seconds(phase) for step in steps)


def _time_of_steps(steps: Sequence[StepTrace], parts: Mapping[str, float]) -> dict[str, float]:
    """Splits the time from the first step's begin to the last one's end, in seconds.

    Keys are "host: schedule" and so on by phase, "device: " and a part of the model (or "device" without a profile),
    "compile", "profiler": its starting and writing, and "between steps": the caller, and the trace's other files. The
    wait for the device is divided in the proportions of `parts`.
    """
    if not steps:
        return {}
    seconds = {f"host: {phase}": _seconds(steps, phase) for phase in PHASES}
    compiling, waiting = seconds.pop("host: compile"), seconds.pop("host: wait")
    whole = sum(parts.values())
    device = {f"device: {part}": waiting * s / whole for part, s in parts.items()} if whole else {"device": waiting}
    found = seconds | device | {"compile": compiling, "profiler": sum(s.profiler_s for s in steps)}
    between = steps[-1].ended_s - steps[0].began_s - sum(found.values())
    return found | {"between steps": max(between, 0.0)}


def compile_summary(functions: Sequence[CompiledFunction]) -> dict[str, Any]:
    """Counts the compiled functions and their seconds; late ones are those that a step had to wait for."""
    late = [f for f in functions if f.step is not None]
    return {
        "functions": len(functions),
        "traced_s": sum(f.traced_s for f in functions),
        "compiled_s": sum(f.compiled_s for f in functions),
        "in_steps": len(late),
        "in_steps_s": sum(f.traced_s + f.compiled_s for f in late),
    }
