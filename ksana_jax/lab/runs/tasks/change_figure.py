"""Figures of one number: its changes against a baseline with their intervals, or its means without a baseline; as lines
over the grid's key, or points over live KV."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ksana_jax.lab.runs.figures import (
    axis_title,
    byte_unit,
    explain,
    label_ends,
    marker_style,
    plain_numbers,
    style_indices,
)
from ksana_jax.lab.runs.significance import PER_CENT, baseline_change, shows_changes, wilson
from ksana_jax.lab.runs.tasks.results import SIMULATED, Column, ResultRow, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT_INCHES = 2.9
MAX_LABELS = 7
GREY = "#BBBBBB"
# Largest ratio of ratios on a linear axis.
_LINEAR = 2.0
_TICKS = np.array([-95, -90, -75, -50, -25, 0, 25, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5])  # %
# % of an axis that is logarithmic from 1 % on, to both sides.
_SMALL_TICKS = [sign * tick for tick in (1, 5, 20, 100, 1e3, 1e4, 1e5) for sign in (1, -1)]


class Point(NamedTuple):
    """A row's place on the axes; y is NaN where it is not drawn. low, high: the ends of its interval, or y."""

    x: float
    y: float
    low: float
    high: float


def draw_lines(figure: Figure, rows: Sequence[ResultRow], column: Column) -> None:
    """Draws a line for each variant over the grid's last key or, where many hold other bytes than the others, over
    live KV. A row outside the grid that sets the key is a point. Seven have colours, and labels at their ends or, over
    live KV, in a legend: those that are best at the first value; the others are grey. Lines of simulated memory are
    dashed."""
    from matplotlib.transforms import ScaledTranslation

    key, multiples, changes = list(rows[0].point)[-1], _multiples(rows), shows_changes(rows, column)
    others = {label: multiple for label, multiple in multiples.items() if abs(math.log(multiple)) > 0.1}
    of_bytes = len(others) > len(multiples) / 4
    lines: dict[str, list[Point]] = defaultdict(list)
    for row in rows:
        x = row.value(key)
        if x is not None and of_bytes:
            x = _held(row, "live_kv_bytes", changes)
        if x is not None and (point := _point(x, row, column, changes)) is not None:
            also = words({k: v for k, v in row.point.items() if k != key})
            lines[", ".join([row.label] * bool(row.label) + also)].append(point)
    for points in lines.values():
        points.sort()
    sign = 1 if column.best == "min" else -1
    best = sorted(lines, key=lambda name: (lines[name][0].x, sign * lines[name][0].y))[:MAX_LABELS]
    figure.set_figheight(HEIGHT_INCHES)
    axes = figure.subplots()
    styles = dict(zip(best, map(marker_style, style_indices(best)), strict=True))
    bytes_said = {} if of_bytes else {name: f" ({multiple:.0f}x the bytes)" for name, multiple in others.items()}
    labels = {name: name.removesuffix(SIMULATED) + bytes_said.get(name, "") for name in best}
    for name in [*(name for name in lines if name not in best), *best]:
        if name not in best:
            axes.plot(*zip(*(p[:2] for p in lines[name]), strict=True), color=GREY, marker=".", linewidth=0.6, zorder=1)
            continue
        style = {**styles[name], "linestyle": "--" if name.endswith(SIMULATED) else "-", "linewidth": 1.0, "zorder": 2}
        # Side by side, so that intervals do not hide each other.
        moved = ScaledTranslation((best.index(name) - (len(best) - 1) / 2) / 72, 0, figure.dpi_scale_trans)
        _errorbar(axes, lines[name], label=labels[name], transform=axes.transData + moved, **style)
    _finish(axes, rows, column, changes)
    values = sorted({point.x for points in lines.values() for point in points})
    if min(values) > 0 and max(values) >= 8 * min(values):
        axes.set_xscale("log", base=2)
    if of_bytes:  # lines that end at different bytes
        _label_held(axes, "KV held", rows if not changes else ())
        axes.legend(loc="best")
        return
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_xlabel(axis_title(key, values))
    label_ends(axes, [(label, *lines[name][-1][:2], styles[name]["color"]) for name, label in labels.items()])


def draw_points(figure: Figure, rows: Sequence[ResultRow], column: Column) -> None:
    """Draws a point for each variant over its live KV, or over its weights if more of these differ, in % of its
    baseline's. Of more than seven, those have colours and labels that no other beats at their bytes or fewer."""
    figure.set_figheight(HEIGHT_INCHES)
    axes = figure.subplots()
    changes = shows_changes(rows, column)
    of_weights = len({row.mean("weight_bytes") for row in rows}) > len({_held(row, relative=False) for row in rows})
    key, shown = "weight_bytes" if of_weights else "live_kv_bytes", {}
    for row in rows:
        size = _held(row, key, changes)
        if size is not None and (point := _point(size, row, column, changes)) is not None:
            shown[row.name] = point
    front = _front(shown, column) if len(shown) > MAX_LABELS else list(shown)
    styles = dict(zip(front, map(marker_style, style_indices(front)), strict=True))
    for name, point in sorted(shown.items(), key=lambda item: item[0] in front):
        style = styles.get(name, {"color": GREY, "marker": "."})
        _errorbar(axes, [point], label=name if name in front else "_nolegend_", linestyle="", **style)
    _finish(axes, rows, column, changes, small=True)
    kept = [point.x for point in shown.values()]
    if kept and min(kept) > 0 and max(kept) > 4 * min(kept):
        axes.set_xscale("log", base=2)
    _label_held(axes, "weights" if of_weights else "KV held", rows if not changes else (), key)
    label_ends(axes, [(name, *shown[name][:2], styles[name]["color"]) for name in front])


def _point(x: float, row: ResultRow, column: Column, changes: bool) -> Point | None:
    """Returns where a row is drawn: at the ratio of its change, or at its mean."""
    if not changes:
        if (mean := row.mean(column.key)) is None:
            return None
        ends, scale = _ends(row, column) or (mean, mean), getattr(column.write, "factor", 1.0)
        numbers = [scale * value for value in (mean, *ends)]
    elif (change := baseline_change(row, column.key)) is not None:
        numbers = [1 + (change.mean if end is None else end) for end in (change.mean, change.low, change.high)]
    else:
        return None
    y, *ends = numbers
    return Point(x, y if math.isfinite(y) else math.nan, *[end if math.isfinite(end) else y for end in ends])


def _ends(row: ResultRow, column: Column) -> tuple[float, float] | None:
    """Returns the interval of a row's mean of right and wrong answers; None of other numbers."""
    values = row.values.get(column.key, ())
    answers = values and column.key in row.weights and set(values) <= {0, 1}
    return wilson(row.mean(column.key) or 0.0, len(values)) if answers else None


def _held(row: ResultRow, key: str = "live_kv_bytes", relative: bool = True) -> float | None:
    """Returns a row's live KV, or other bytes; relative: in % of its baseline's."""
    held = row.mean(key if key in row.values else "simulated_kv_bytes")
    if not relative:
        return held
    whole = row.baseline and row.baseline.mean(key)
    return 100 * held / whole if held and whole else None


def _multiples(rows: Sequence[ResultRow]) -> dict[str, float]:
    """Returns how many times as much KV each variant holds as the median of the variants, at the same point."""
    held: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if value := _held(row, relative=False):
            held[repr(row.point)][row.label] = value
    return {
        label: found / statistics.median(there.values()) for there in held.values() for label, found in there.items()
    }


def _label_held(axes: Axes, name: str, rows: Sequence[ResultRow], key: str = "live_kv_bytes") -> None:
    """Labels the axis of bytes: in % of the baseline's or, if rows are given, in units that suit them."""
    size, unit = byte_unit(max((row.mean(key) or 0 for row in rows), default=0))
    plain_numbers(axes.xaxis)
    if rows:
        axes.xaxis.set_major_formatter(lambda held, _: f"{held / size:g}")
    axes.set_xlabel(f"{name} ({unit})" if rows else f"{name} (% of the baseline's)")


def _front(shown: dict[str, Point], column: Column) -> list[str]:
    """Returns the names of the points that none beats at their KV or less (the Pareto front)."""
    sign, best, names = 1 if column.best == "min" else -1, math.inf, []
    for name, point in sorted(shown.items(), key=lambda item: (item[1].x, sign * item[1].y)):
        if sign * point.y < best:
            best = sign * point.y
            names.append(name)
    return names


def _errorbar(axes: Axes, points: Sequence[Point], **style: Any) -> None:
    errors = [[point.y - point.low for point in points], [point.high - point.y for point in points]]
    for point in points:
        if math.isfinite(point.y):
            axes.update_datalim([(point.x, point.low), (point.x, point.high)])
    given = errors if any(map(any, errors)) else None
    x, y = [point.x for point in points], [point.y for point in points]
    axes.errorbar(x, y, given, capsize=1.5, elinewidth=0.6, capthick=0.6, **style)


def _finish(axes: Axes, rows: Sequence[ResultRow], column: Column, changes: bool, small: bool = False) -> None:
    """Labels the axis of changes, which is logarithmic for ratios far apart; small: in ratios minus 1."""
    axes.autoscale_view()
    if not changes:
        title = re.sub(r"^ppl(\*?) (\S+)$", r"perplexity\1 at positions \2", column.title)
        axes.set_ylabel(re.sub(", %$", " (%)", title))
        if any(_ends(row, column) for row in rows):
            counts = {len(row.values.get(column.key, ())) for row in rows}
            explain(axes, f"bars: {PER_CENT} % interval (Wilson), n = {max(counts)}")
        return
    title = re.sub(r"^loss(\*?) (\S+), %$", r"perplexity\1 increase (%)\nat positions \2", column.change)
    axes.set_ylabel(title)
    pairs = max(change.num_pairs for row in rows if (change := baseline_change(row, column.key)) is not None)
    if pairs > 1:
        explain(axes, f"bars: {PER_CENT} % interval of the paired difference, n = {pairs}")
    axes.axhline(1, color="#000000", linewidth=0.4)
    low, high = axes.dataLim.intervaly
    if not math.isfinite(low + high):
        return
    if small and high - low > 0.05:
        there, back = lambda y: np.arcsinh(200 * (y - 1)), lambda y: 1 + np.sinh(y) / 200
        axes.set_yscale("function", functions=(there, back))
        axes.set_ylabel(f"{title}, logarithmic from 1 % on")
        margin = 0.05 * (there(high) - there(low))
        axes.set_ylim(back(there(low) - margin), back(there(high) + margin))
        ticks = [tick for tick in sorted([0, *_SMALL_TICKS]) if low <= 1 + tick / 100 <= high]
        axes.set_yticks([1 + tick / 100 for tick in ticks], [_percent(tick, 1) for tick in ticks])
        return
    low = max(low, 0.02)
    if high > _LINEAR * low:
        axes.set_yscale("log")
        axes.set_ylabel(f"{title}, logarithmic")
        axes.set_ylim(low := low * 0.9, high := high * 1.1)
        ticks = 1 + _TICKS / 100
        axes.set_yticks(ticks[(low <= ticks) & (ticks <= high)])
        axes.minorticks_off()
    digits = 1 if high - low > 0.01 else 2
    axes.yaxis.set_major_formatter(lambda ratio, _: _percent(100 * (ratio - 1), digits))


def _percent(value: float, digits: int) -> str:
    text = f"{value:+,.{digits}f}".removesuffix(".0").replace("-", "−")
    return text if any(digit in "123456789" for digit in text) else "0"
