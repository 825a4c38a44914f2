"""Our implementations with other values of their tuning keywords, on three shapes of decode."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from typing import Any

import jax

from experiments.gpu.candidates import implementations, ours_as
from experiments.gpu.cases import decode_cases
from experiments.gpu.context import Context
from experiments.gpu.race import Entry, race

# Of keywords that an implementation may have; those it lacks are left out.
RANGES: dict[str, tuple[Any, ...]] = {
    "num_workers": (132, 264, 396), "stages": (2, 3, 4), "num_warps": (4, 8), "num_stages": (3, 4),
    "num_splits": (4, 16),
}  # fmt: skip
SHAPES = ("64x4k", "1x4k", "256x512", "2x100")


def run(context: Context) -> None:
    entries = []
    for case in decode_cases(64, context.tiny):
        if case.name not in SHAPES:
            continue
        candidates = []
        for name, attend in implementations().items():
            known = [k for k in RANGES if k in inspect.signature(attend).parameters]
            for values in itertools.product(*(RANGES[k] for k in known)):
                keywords = dict(zip(known, values))
                label = ", ".join([name, *(f"{k} {v}" for k, v in keywords.items())])
                candidates.append(ours_as(label, functools.partial(attend, **keywords), case))
        entries.append(Entry(dataclasses.replace(case), candidates))
    measured = race(context, "tuning", entries, compile_s=context.left() * 0.6)
    for shape in SHAPES:
        times = {who: s for (case, who, mode), s in measured.items() if case == shape and mode == "chained"}
        if times:
            best = min(times, key=lambda who: times[who])
            context.value(f"tuning, {shape}: best is {best}", times[best] * 1e6, "us")
    if jax.default_backend() != "gpu":
        context.say("the reference has nothing to tune")
