"""Where the time of a trace went, padding by bucket, and what was compiled. Plain numbers; knows no engine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ksana_jax.lab.trace.functions import Function, name_of
from ksana_jax.lab.trace.steps import PHASES, StepTrace
from ksana_jax.scheduler.step.types import StepShape


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The steps of one shape. padding: fraction of their tokens that were padding. median_ms: of steps that compiled
    nothing and ran without the profiler, None if there is none."""

    name: str
    num_steps: int
    num_tokens: int
    padded_tokens: int
    median_ms: float | None
    device_s: float

    @property
    def padding(self) -> float:
        return 1 - self.num_tokens / self.padded_tokens


def buckets_of(steps: Sequence[StepTrace]) -> list[Bucket]:
    """Returns the steps by shape, those that took the most time on the device first."""
    shapes: dict[StepShape, list[StepTrace]] = {}
    for step in steps:
        shapes.setdefault(step.record.shape, []).append(step)
    found = []
    for shape, some in shapes.items():
        found.append(
            Bucket(
                name_of(shape),
                len(some),
                sum(s.record.num_tokens for s in some),
                shape.num_tokens * len(some),
                _median_ms(some),
                sum(s.seconds("device") for s in some),
            )
        )
    return sorted(found, key=lambda bucket: -bucket.device_s)


def _median_ms(steps: Sequence[StepTrace]) -> float | None:
    clean = [s.ended_s - s.began_s for s in steps if not s.functions and not s.profiled]
    return 1e3 * statistics.median(clean) if clean else None


def time_of_steps(steps: Sequence[StepTrace], parts: Mapping[str, float]) -> dict[str, float]:
    """Splits the time from the first step's begin to the last one's end, in seconds.

    Keys are "host: schedule" and so on by phase, "device: " and a part of the model (or "device" without a profile),
    "compile", "profiler": its starting and writing, and "between steps": the caller, and the trace's other files.

    Args:
      parts: seconds of each part in the profiled steps; the wait for the device is divided in these proportions.
    """
    if not steps:
        return {}
    seconds = {f"host: {phase}": sum(s.seconds(phase) for s in steps) for phase in PHASES}
    compiling, waiting = seconds.pop("host: compile"), seconds.pop("host: wait")
    whole = sum(parts.values())
    device = {f"device: {part}": waiting * s / whole for part, s in parts.items()} if whole else {"device": waiting}
    found = seconds | device | {"compile": compiling, "profiler": sum(s.profiler_s for s in steps)}
    between = steps[-1].ended_s - steps[0].began_s - sum(found.values())
    return found | {"between steps": max(between, 0.0)}


def summary(steps: Sequence[StepTrace], parts: Mapping[str, float]) -> dict[str, Any]:
    """Summarises the steps of one engine as plain values.

    padding: fraction of all tokens that were padding. padding_s: the same fraction of each step's time on the device,
    an upper bound for what padding cost, since attention skips it. median_ms: as in `Bucket`. device_idle: fraction of
    the time with work in which the device had nothing to do, at least; of the same steps.
    """
    buckets, clean = buckets_of(steps), [s for s in steps if not s.functions and not s.profiled]
    idle_s, device_s = sum(s.idle_s for s in clean), sum(s.seconds("device") for s in clean)
    computed, padded = sum(b.num_tokens for b in buckets), sum(b.padded_tokens for b in buckets)
    return {
        "num_steps": len(steps),
        "num_tokens": computed,
        "padded_tokens": padded,
        "padding": 1 - computed / padded if padded else 0.0,
        "padding_s": sum(b.padding * b.device_s for b in buckets),
        "seconds": steps[-1].ended_s - steps[0].began_s if steps else 0.0,
        "median_ms": _median_ms(steps),
        "device_idle": idle_s / (idle_s + device_s) if clean else None,
        "profiled_steps": sum(s.profiled for s in steps),
        "compiling_steps": sum(bool(s.functions) for s in steps),
        "time_s": time_of_steps(steps, parts),
        "profiled_s": dict(parts),
        "buckets": [dataclasses.asdict(b) | {"padding": b.padding} for b in buckets],
    }


def compile_summary(functions: Sequence[Function]) -> dict[str, Any]:
    """Counts the compiled functions and their seconds; late ones are those that a step had to wait for."""
    late = [f for f in functions if f.step is not None]
    return {
        "functions": len(functions),
        "traced_s": sum(f.traced_s for f in functions),
        "compiled_s": sum(f.compiled_s for f in functions),
        "in_steps": len(late),
        "in_steps_s": sum(f.traced_s + f.compiled_s for f in late),
    }
