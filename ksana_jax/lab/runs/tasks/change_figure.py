"""Figures of changes against a baseline with their intervals: lines over the grid's key, or points over live KV."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.lab.runs.figures import COLOURS, axis_title, label_ends, plain_numbers
from ksana_jax.lab.runs.significance import Change, baseline_change
from ksana_jax.lab.runs.tasks.results import SIMULATED, Column, ResultRow, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_INCHES = 2.9
MAX_LINES = 7
MAX_POINTS = 12
GREY = "#BBBBBB"
MARKERS = "osD^v<>P*X"
_HELD = "KV held (% of the full cache)"
# Largest ratio of ratios on a linear axis.
_LINEAR = 2.0
_TICKS = np.array([-95, -90, -75, -50, -25, 0, 25, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5])  # %


def draw_lines(figure: Figure, rows: Sequence[ResultRow], column: Column) -> None:
    """Draws a line for each variant over the grid's last key or, where many hold other bytes than the others, over
    live KV. Seven have colours, intervals, and labels at their ends: those with the least loss at the first value; the
    others are grey. Lines of simulated memory are dashed."""
    from matplotlib.transforms import ScaledTranslation

    key, multiples = list(rows[0].point)[-1], _multiples(rows)
    others = {label: multiple for label, multiple in multiples.items() if abs(math.log(multiple)) > 0.1}
    of_bytes = len(others) > len(multiples) / 4
    lines: dict[str, list[tuple[float, Change]]] = defaultdict(list)
    for row in rows:
        if row.point[key] is not None and (change := baseline_change(row, column.key)) is not None:
            also = words({k: v for k, v in row.point.items() if k != key})
            x = _held(row) if of_bytes else row.point[key]
            if x is not None:
                lines[", ".join([row.label, *also])].append((x, change))
    for points in lines.values():
        points.sort(key=lambda point: point[0])
    sign = 1 if column.best == "min" else -1
    best = sorted(lines, key=lambda name: sign * lines[name][0][1].mean)[:MAX_LINES]
    figure.set_figheight(HEIGHT_INCHES)
    axes = figure.subplots()
    for name in [*(name for name in lines if name not in best), *best]:
        if name not in best:
            axes.plot(*zip(*(_place(p, column) for p in lines[name]), strict=True), color=GREY, linewidth=0.6, zorder=1)
            continue
        index = best.index(name)
        style = {"color": COLOURS[index], "marker": MARKERS[index], "linewidth": 1.0, "zorder": 2}
        if name.endswith(SIMULATED):
            style["linestyle"] = "--"
        # Side by side, so that intervals do not hide each other.
        moved = ScaledTranslation((index - (len(best) - 1) / 2) / 72, 0, figure.dpi_scale_trans)
        _errorbar(axes, lines[name], column, label=name, transform=axes.transData + moved, **style)
    _finish(axes, column)
    values = sorted({x for points in lines.values() for x, _ in points})
    if min(values) > 0 and max(values) >= 8 * min(values):
        axes.set_xscale("log", base=2)
    if of_bytes:
        _label_held(axes)
    else:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
        axes.set_xlabel(axis_title(key, values))
    bytes_said = {} if of_bytes else {name: f" ({multiple:.0f}x the bytes)" for name, multiple in others.items()}
    labels = [name.removesuffix(SIMULATED) + bytes_said.get(name, "") for name in best]
    ends = [(label, *_place(lines[name][-1], column)) for label, name in zip(labels, best, strict=True)]
    label_ends(axes, [(*end, COLOURS[index]) for index, end in enumerate(ends)])


def draw_points(figure: Figure, rows: Sequence[ResultRow], column: Column) -> None:
    """Draws a point for each variant over its live KV in % of its baseline's, or over its weights where they alone
    differ. Of more than twelve, those have colours and labels that no other beats at their bytes or fewer."""
    figure.set_figheight(HEIGHT_INCHES)
    axes = figure.subplots()
    of_weights = len({row.mean("weight_bytes") for row in rows}) > 1 and len({_held(row) for row in rows}) <= 2
    key, shown = "weight_bytes" if of_weights else "live_kv_bytes", []
    for row in rows:
        change, size = baseline_change(row, column.key), _held(row, key)
        if change is not None and size is not None:
            shown.append((row.name, [(size, change)]))
    front = _front(shown, column) if len(shown) > MAX_POINTS else [name for name, _ in shown]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(front)}
    for index, (name, point) in enumerate(shown):
        style = {"color": colours.get(name, GREY), "marker": MARKERS[index % len(MARKERS)], "linestyle": ""}
        _errorbar(axes, point, column, label=name if name in front else "_nolegend_", **style)
    _finish(axes, column)
    kept = [points[0][0] for _, points in shown]
    if max(kept) > 4 * min(kept):
        axes.set_xscale("log", base=2)
    _label_held(axes, "weights (% of the baseline's)" if of_weights else _HELD)
    label_ends(axes, [(name, *_place(point, column), colours[name]) for name, [point] in shown if name in front])


def _held(row: ResultRow, key: str = "live_kv_bytes") -> float | None:
    """Returns a row's live KV, or other bytes, in % of its baseline's."""
    whole = row.baseline and row.baseline.mean(key)
    held = row.mean(key if key in row.values else "simulated_kv_bytes")
    return 100 * held / whole if held and whole else None


def _multiples(rows: Sequence[ResultRow]) -> dict[str, float]:
    """Returns how many times as much KV each variant holds as the median of the variants, at the same point."""
    held: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        held[repr(row.point)][row.label] = _held(row) or math.nan
    return {
        label: found / statistics.median(there.values()) for there in held.values() for label, found in there.items()
    }


def _label_held(axes: Axes, title: str = _HELD) -> None:
    plain_numbers(axes.xaxis)
    axes.set_xlabel(title)


def _front(shown: Sequence[tuple[str, list[tuple[float, Change]]]], column: Column) -> list[str]:
    """Returns the names of the points that none beats at their KV or less (the Pareto front)."""
    sign, best, names = 1 if column.best == "min" else -1, math.inf, []
    for name, [(_, change)] in sorted(shown, key=lambda item: (item[1][0][0], sign * item[1][0][1].mean)):
        if sign * change.mean < best:
            best = sign * change.mean
            names.append(name)
    return names


def _errorbar(axes: Axes, points: Sequence[tuple[float, Change]], column: Column, **style: Any) -> None:
    middle = [_place(point, column)[1] for point in points]
    ends = [
        [abs(_value(end, change, column) - y) if end is not None and math.isfinite(end) else 0.0 for end in (low, high)]
        for y, (_, change) in zip(middle, points, strict=True)
        for low, high in [(change.low, change.high)]
    ]
    errors = list(zip(*ends, strict=True)) if any(map(any, ends)) else None
    for (x, _), y, (below, above) in zip(points, middle, ends, strict=True):
        if math.isfinite(y):
            axes.update_datalim([(x, y - below), (x, y + above)])
    axes.errorbar([x for x, _ in points], middle, errors, capsize=1.5, elinewidth=0.6, capthick=0.6, **style)


def _value(value: float, change: Change, column: Column) -> float:
    """Returns a place on the axis: a ratio, or a difference in the column's unit."""
    return 1 + value if change.relative else value * getattr(column.write, "factor", 1.0)


def _place(point: tuple[float, Change], column: Column) -> tuple[float, float]:
    """Returns where a point is drawn; y is NaN where it is not."""
    x, change = point
    y = _value(change.mean, change, column)
    return x, y if math.isfinite(y) else math.nan


def _finish(axes: Axes, column: Column) -> None:
    """Labels the axis of changes, which is logarithmic for ratios far apart."""
    axes.set_ylabel(re.sub(r"^(\S+) (\S+), %$", r"\1 at positions \2 (%)", column.change))
    axes.autoscale_view()
    if not column.change.endswith("%"):
        axes.axhline(0, color="#000000", linewidth=0.4)
        return
    axes.axhline(1, color="#000000", linewidth=0.4)
    low, high = axes.dataLim.intervaly
    if not math.isfinite(low + high):
        return
    low = max(low, 0.02)
    if high > _LINEAR * low:
        axes.set_yscale("log")
        axes.set_ylim(low := low * 0.9, high := high * 1.1)
        ticks = 1 + _TICKS / 100
        axes.set_yticks(ticks[(low <= ticks) & (ticks <= high)])
        axes.minorticks_off()
    digits = 1 if high - low > 0.01 else 2
    axes.yaxis.set_major_formatter(lambda ratio, _: _percent(100 * (ratio - 1), digits))


def _percent(value: float, digits: int) -> str:
    text = f"{value:+,.{digits}f}".removesuffix(".0").replace("-", "−")
    return text if any(digit in "123456789" for digit in text) else "0"
