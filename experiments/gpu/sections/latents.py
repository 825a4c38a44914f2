"""Decode over latents (MLA), of 16 query heads, which memory limits, and of 128, which the tensor cores limit."""

from __future__ import annotations

from experiments.gpu import others
from experiments.gpu.candidates import ours
from experiments.gpu.cases import latent_cases
from experiments.gpu.context import Context
from experiments.gpu.race import Entry, race


def run(context: Context) -> None:
    cases = {case.name: case for case in latent_cases(context.tiny)}
    entries = [Entry(case, ours(case)) for case in cases.values()]
    measured = race(context, "latents", entries, work=lambda case: {"bytes": case.bytes, "flops": case.flops})
    for (name, who, mode), seconds in measured.items():
        if mode == "chained":
            theirs, case = others.best("H200", f"latents, {name}", "us"), cases[name]
            context.value(f"latents, {name}, {who}", seconds * 1e6, "us", bar=theirs and theirs.value)
            context.value(f"latents, {name}, {who}: bytes", case.bytes / seconds / 1e12, "TB/s")
            context.value(f"latents, {name}, {who}: products", case.flops / seconds / 1e12, "TFLOP/s")
