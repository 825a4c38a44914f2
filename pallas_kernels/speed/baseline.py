"""Predictions that are stored beside the code: a change that costs more than 5 % of them fails the compiler report.

They belong to one version of jax and of ptxas; other versions are not compared.
`pallas_kernels.speed.update` stores new ones.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("baseline.json")
# Microseconds of the same shapes on an H200, by case; `experiments.gpu.measured` writes them.
MEASURED = Path(__file__).with_name("measured.json")
README = Path(__file__).parents[1] / "README.md"
ALLOWED = 1.05
_TABLES = ("computed speed", "computed steps")
_SHAPES = ("64x4k", "1x32k", "256x512")


def versions() -> dict[str, str]:
    """Versions of the compilers that predictions depend on."""
    found = {}
    for name, package in (("jax", "jax"), ("ptxas", "nvidia-cuda-nvcc")):
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


@functools.cache
def stored() -> dict[str, Any]:
    """The stored predictions: "versions", and "cases" by name."""
    return json.loads(PATH.read_text()) if PATH.exists() else {"versions": {}, "cases": {}}


@functools.cache
def measured() -> dict[str, dict[str, float]]:
    """The measured microseconds of shapes, by case."""
    return json.loads(MEASURED.read_text())


def key(row: Mapping[str, Any]) -> str:
    """The name of a row's case."""
    return " ".join([row["name"], *(f"{name}={value}" for name, value in row["config"].items())])


def entries(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the stored part of the rows of a report: rows with predictions."""
    found: dict[str, Any] = {}
    for row in rows:
        if row.get("predictions"):
            case = found.setdefault(key(row), {"kernels": {}, "shapes": {}})
            if "launches" in row:  # a whole program
                case["launches"] = {name: row[name] for name in ("launches", "launches_per_layer")}
            else:
                turn = row["speed"]["turn"]
                numbers = {"instructions": turn["instructions"], "cycles": row["speed"]["cycles"]}
                case["kernels"][row["kernel"]] = numbers | {"blocks": row["speed"]["blocks"]}
            for said in row["predictions"]:
                case["shapes"][said["shape"]] = {name: said[name] for name in ("us", "share", "tflops", "limit")}
    return found


def costs(case: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of an entry that must not grow: cycles of loops, microseconds of shapes, launches."""
    cycles = {f"cycles of a turn of {name}": numbers["cycles"] for name, numbers in case["kernels"].items()}
    launches = {name.replace("_", " "): number for name, number in case.get("launches", {}).items()}
    return cycles | {f"us of {name}": numbers["us"] for name, numbers in case["shapes"].items()} | launches


def judge(rows: Iterable[Mapping[str, Any]], base: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns cases that have become more than 5 % more expensive; none if the compilers differ."""
    if base["versions"] != versions():
        return {}
    wrong: dict[str, list[str]] = {}
    for name, case in entries(rows).items():
        before = costs(base["cases"][name]) if name in base["cases"] else {}
        for what, cost in costs(case).items():
            if cost > ALLOWED * before.get(what, cost):
                wrong.setdefault(name, []).append(f"computed {what}: {cost:,g}, stored {before[what]:,g}")
    return wrong


def changes(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Lines about each number that differs, before and after, in the order of the new entries."""
    found = []
    for name, case in new.items():
        before = costs(old[name]) if name in old else {}
        for what, cost in costs(case).items():
            if before.get(what) != cost:
                was = f"{before[what]:>10,g}" if what in before else "         -"
                ratio = f"{cost / before[what] - 1:+8.1%}" if before.get(what) else ""
                found.append(f"{name:<40} {what:<36} {was} -> {cost:>10,g} {ratio}")
    return found + [f"{name:<40} is gone" for name in old if name not in new]


def table(cases: Mapping[str, Any]) -> str:
    """Returns stored predictions as a Markdown table."""
    lines = [
        f"| computed | instructions of a turn | cycles of a turn | {' | '.join(_SHAPES)} | limit |",
        "|---|---:|---:|" + "---:|" * len(_SHAPES) + "---|",
    ]
    for name, case in cases.items():
        if not case["kernels"]:
            continue
        kernels, shapes, took = list(case["kernels"].values()), case["shapes"], measured().get(name, {})
        first = max(kernels, key=lambda kernel: kernel["instructions"])
        cells = [_cell(shapes[shape], took.get(shape)) if shape in shapes else "" for shape in _SHAPES]
        if not any(cells):  # of other shapes: all of them in the first column
            cells[0] = "; ".join(f"{shape}: {_cell(numbers, took.get(shape))}" for shape, numbers in shapes.items())
        limit = next(iter(shapes.values()))["limit"]
        numbers = f"{first['instructions']:,} | {first['cycles']:,} of {first['blocks']} blocks"
        lines.append(f"| {name} | {numbers} | {' | '.join(cells)} | {limit} |")
    return "\n".join(lines) + "\n"


def _cell(numbers: Mapping[str, Any], took_us: float | None) -> str:
    rate = f"{numbers['tflops']:,.0f} TFLOP/s" if numbers["tflops"] else f"{numbers['share']:.2f}"
    return f"{numbers['us']:,.0f} us, {rate}" + (f", × {took_us / numbers['us']:.2f}" if took_us else "")


def table_of_steps(steps: Sequence[Mapping[str, Any]]) -> str:
    """Returns stored predictions of whole steps as a Markdown table, in microseconds."""
    names = list(dict.fromkeys(name for step in steps for name in step["terms"]))
    lines = [
        f"| computed, us | {' | '.join(names)} | a step, ms | launches, of a layer |",
        "|---|" + "---:|" * (len(names) + 2),
    ]
    for step in steps:
        cells = [f"{step['terms'][name]:,.0f}" if name in step["terms"] else "" for name in names]
        total = f"**{step['ms']:.2f}**" + (f", aim {step['aim_ms']:g}" if step["aim_ms"] else "")
        launches = f"{step['launches']}, {step['launches_per_layer']}"
        lines.append(f"| {step['shape']} | {' | '.join(cells)} | {total} | {launches} |")
    return "\n".join(lines) + "\n"


def with_tables(readme: str, base: Mapping[str, Any]) -> str:
    """Returns the text of the README with the tables of these predictions."""
    for name, lines in zip(_TABLES, (table(base["cases"]), table_of_steps(base.get("steps", ())))):
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
        readme = re.sub(f"(?<={begin}).*(?={end})", lambda _, lines=lines: f"\n{lines}\n", readme, flags=re.DOTALL)
    return readme
