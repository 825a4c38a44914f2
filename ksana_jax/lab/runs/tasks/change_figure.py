"""Figures of changes against a baseline with their intervals: lines over the grid's key, or points over live KV."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.lab.runs.figures import COLOURS, axis_title, label_ends, plain_numbers
from ksana_jax.lab.runs.significance import Change, baseline_change
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_INCHES = 2.9
MAX_LINES = 7
MAX_POINTS = 12
GREY = "#BBBBBB"
MARKERS = "osD^v<>P*X"
# Largest ratio of ratios on a linear axis.
_LINEAR = 2.0
_TICKS = (
    -95,
    -90,
    -75,
    -50,
    -25,
    0,
    25,
    50,
    100,
    200,
    500,
    1000,
    2000,
    5000,
    10000,
    100000,
)  # %


def draw_lines(figure: Figure, rows: Sequence[ResultRow], column: Column) -> None:
    """Draws a line for each variant over the grid's last key. The seven with the least loss at its first value have
    colours and labels at their ends; the others are grey."""
    key = list(rows[0].point)[-1]
    lines: dict[str, list[tuple[float, Change]]] = defaultdict(list)
    for row in rows:
        if row.point[key] is not None and (change := baseline_change(row, column.key)) is not None:
            others = words({k: v for k, v in row.point.items() if k != key})
            lines[", ".join([row.label, *others])].append((row.point[key], change))
    for points in lines.values():
        points.sort(key=lambda point: point[0])
    sign = 1 if column.best == "min" else -1
    best = sorted(lines, key=lambda name: sign * lines[name][0][1].mean)[:MAX_LINES]
    figure.set_figheight(HEIGHT_INCHES)
    axes = figure.subplots()
    for name in [*(name for name in lines if name not in best), *best]:
        style: dict[str, Any] = {"color": GREY, "linewidth": 0.6, "zorder": 1}
        if name in best:
            index = best.index(name)
            style = {"color": COLOURS[index], "marker": MARKERS[index], "linewidth": 1.0, "zorder": 2}
        _errorbar(axes, lines[name], column, label=name if name in best else "_nolegend_", **style)
    _finish(axes, column)
    values = sorted({x for points in lines.values() for x, _ in points})
    if min(values) > 0 and max(values) >= 8 * min(values):
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(axis_title(key, values))
    label_ends(axes, [(name, *_end(lines[name], column), COLOURS[best.index(name)]) for name in best])


def draw_points(figure: Figure, rows: Sequence[ResultRow], column: Column) -> None:
    """Draws a point for each variant over its live KV, in % of its baseline's. Of more than twelve, those have colours
    and labels that no other beats at their KV or less."""
    figure.set_figheight(HEIGHT_INCHES)
    axes = figure.subplots()
    shown = []
    for row in rows:
        change, whole = baseline_change(row, column.key), row.baseline and row.baseline.mean("live_kv_bytes")
        held = row.mean("live_kv_bytes" if "live_kv_bytes" in row.values else "simulated_kv_bytes")
        if change is not None and whole and held:
            shown.append((row.name, [(100 * held / whole, change)]))
    front = _front(shown, column) if len(shown) > MAX_POINTS else [name for name, _ in shown]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(front)}
    for index, (name, point) in enumerate(shown):
        style = {"color": colours.get(name, GREY), "marker": MARKERS[index % len(MARKERS)], "linestyle": ""}
        _errorbar(axes, point, column, label=name if name in front else "_nolegend_", **style)
    _finish(axes, column)
    kept = [points[0][0] for _, points in shown]
    if max(kept) > 4 * min(kept):
        axes.set_xscale("log", base=2)
    plain_numbers(axes.xaxis)
    axes.set_xlabel("KV held (% of the full cache)")
    label_ends(axes, [(name, *_end(point, column), colours[name]) for name, point in shown if name in front])


def _front(shown: Sequence[tuple[str, list[tuple[float, Change]]]], column: Column) -> list[str]:
    """Returns the names of the points that none beats at their KV or less (the Pareto front)."""
    sign, best, names = 1 if column.best == "min" else -1, math.inf, []
    for name, [(_, change)] in sorted(shown, key=lambda item: (item[1][0][0], sign * item[1][0][1].mean)):
        if sign * change.mean < best:
            best = sign * change.mean
            names.append(name)
    return names


def _errorbar(axes: Axes, points: Sequence[tuple[float, Change]], column: Column, **style: Any) -> None:
    middle = [_value(change.mean, change, column) for _, change in points]
    ends = [
        [abs(_value(end, change, column) - y) if end is not None and math.isfinite(end) else 0.0 for end in (low, high)]
        for y, (_, change) in zip(middle, points, strict=True)
        for low, high in [(change.low, change.high)]
    ]
    errors = list(zip(*ends, strict=True)) if any(map(any, ends)) else None
    axes.errorbar([x for x, _ in points], middle, errors, capsize=1.5, elinewidth=0.6, capthick=0.6, **style)


def _value(value: float, change: Change, column: Column) -> float:
    """Returns a place on the axis: a ratio, or a difference in the column's unit."""
    return 1 + value if change.relative else value * getattr(column.write, "factor", 1.0)


def _end(points: Sequence[tuple[float, Change]], column: Column) -> tuple[float, float]:
    x, change = points[-1]
    return x, _value(change.mean, change, column)


def _finish(axes: Axes, column: Column) -> None:
    """Labels the axis of changes, which is logarithmic for ratios far apart."""
    axes.set_ylabel(re.sub(r"^(\S+) (\S+), %$", r"\1 at positions \2 (%)", column.change))
    axes.autoscale_view()
    low, high = axes.get_ylim()
    if not column.change.endswith("%"):
        axes.axhline(0, color="#000000", linewidth=0.4)
        return
    axes.axhline(1, color="#000000", linewidth=0.4)
    heights = [y for line in axes.lines for y in line.get_ydata(orig=False) if math.isfinite(y) and y > 0]
    if max(heights) > _LINEAR * min(heights):
        axes.set_yscale("log")
        low, high = min(heights) * 0.9, max(heights) * 1.1
        axes.set_ylim(low, high)
        axes.set_yticks([1 + tick / 100 for tick in _TICKS if low <= 1 + tick / 100 <= high])
        axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda ratio, _: _percent(100 * (ratio - 1)))


def _percent(value: float) -> str:
    text = f"{value:+,.1f}".removesuffix(".0").replace("-", "−")
    return text if abs(value) > 0.05 else "0"
