"""The default figure of a task: a panel for each of up to three columns. Knows columns, not tasks."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.lab.runs.figures import (
    COLOURS,
    axis_title,
    explain,
    legend,
    line_style,
    style_indices,
)
from ksana_jax.lab.runs.tasks import change_figure
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, Scaled, not_finite, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_PANELS = 3
_MAX_LABEL = 28  # characters of a line: longer ones would leave no room for bars
_BAR_INCHES = 0.17


def draw_columns(figure: Figure, rows: Sequence[ResultRow], columns: Sequence[Column]) -> None:
    """Draws a headline with a baseline over a grid of numbers, see `change_figure`. Otherwise draws the columns that
    have a best value, or else the first columns; at most three, those whose rows are all equal only if all are."""
    measured = [row for row in rows if row.trials]
    shown = ([c for c in columns if c.best] or list(columns))[:_MAX_PANELS]
    if not shown or not measured:
        return
    shown = [c for c in shown if len({row.mean(c.key) for row in measured}) > 1] or shown
    if shown[0].change and against_numbers([r for r in measured if any(v is not None for v in r.point.values())]):
        change_figure.draw_lines(figure, measured, shown[0])
        return
    if against_numbers(measured):
        panels = draw_panels(figure, measured, [(column.key, column.title, _unit(column)) for column in shown])
        legend(figure, panels[0])
        return
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    figure.set_figheight(0.6 + _BAR_INCHES * max(len(measured), 3))
    for index, (axes, column) in enumerate(zip(panels, shown, strict=True)):
        draw_bars(axes, measured, column.key, COLOURS[1 + index], _unit(column))
        axes.set_xlabel(textwrap.fill(column.title, 36 // len(shown)))


def _unit(column: Column) -> float:
    """Returns the size of the unit in which a column's values are written."""
    return 1 / column.write.factor if isinstance(column.write, Scaled) else 1


def against_numbers(rows: Sequence[ResultRow]) -> bool:
    """True if the last key of the rows' points has two or more numbers, over which lines can be drawn."""
    values = [list(row.point.values())[-1] for row in rows if row.point]
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    return len(numbers) == len(rows) and len(set(numbers)) > 1


def draw_panels(figure: Figure, rows: Sequence[ResultRow], keys: Sequence[tuple[str, str, float]]) -> list[Axes]:
    """Draws a panel of `draw_lines` for each (summary key, title, scale), one below the other; returns them."""
    panels = list(figure.subplots(len(keys), 1, sharex=True, squeeze=False)[:, 0])
    for axes, (key, title, scale) in zip(panels, keys, strict=True):
        draw_lines(axes, rows, key, scale)
        axes.set_ylabel(title)
    key = list(rows[0].point)[-1]
    panels[-1].set_xlabel(axis_title(key, [row.point[key] for row in rows]))
    return panels


def draw_lines(axes: Axes, rows: Sequence[ResultRow], key: str, scale: float = 1) -> None:
    """Draws means of a summary key over the last key of the points, one line per value of other keys."""
    last = list(rows[0].point)[-1]
    lines: dict[str, list[ResultRow]] = defaultdict(list)
    for row in rows:
        others = words({k: v for k, v in row.point.items() if k != last})
        lines[", ".join([row.label] * bool(row.label) + others)].append(row)
    for index, (label, members) in zip(style_indices([*lines]), lines.items(), strict=True):
        members.sort(key=lambda row: row.point[last])
        draw_means(axes, [row.point[last] for row in members], [(row, key) for row in members], index, label, scale)
    values = {row.point[last] for row in rows}
    if len(values) < 4:
        axes.set_xticks(sorted(values))
    elif all(isinstance(value, int) for value in values):
        axes.locator_params(axis="x", integer=True)


def draw_means(
    axes: Axes, x: Sequence[Any], found: Sequence[tuple[ResultRow, str]], index: int, label: str, scale: float = 1
) -> None:
    """Draws the index-th line of a panel: means of summary keys, and a dot for each seed.

    Args:
      found: for each x a row and a key; a row without it leaves a gap. scale: size of the axis' unit.
    """
    means = [(math.nan if (mean := row.mean(key)) is None else mean) / scale for row, key in found]
    dots = [(place, value / scale) for place, (row, key) in zip(x, found, strict=True) for value in _by_seed(row, key)]
    axes.plot(x, means, label=label, marker="_" if dots else "o", **line_style(index))
    _draw_dots(axes, dots, line_style(index)["color"])


def _by_seed(row: ResultRow, key: str) -> Sequence[float]:
    """Returns the values of a summary key that differ by seed alone; none if they do not differ."""
    return row.values[key] if row.sd(key) else ()


def _draw_dots(axes: Axes, dots: Sequence[tuple[float, float]], colour: str) -> None:
    if dots:
        axes.plot(*zip(*dots, strict=True), ".", color=colour, alpha=0.6, markersize=2.5, label="_nolegend_")
        explain(axes, "dots: seeds")


def draw_bars(axes: Axes, rows: Sequence[ResultRow], key: str, colour: str, scale: float = 1) -> None:
    """Draws a bar for each row, the mean of a summary key in units of size `scale`, and a dot for each seed."""
    at = np.arange(len(rows))[::-1]
    means = [(row.mean(key) or 0.0) / scale for row in rows]
    axes.barh(at, [mean if math.isfinite(mean) else 0.0 for mean in means], 0.7, color=colour)
    for y, mean in zip(at, means, strict=True):
        if not math.isfinite(mean):
            axes.text(0, y, f" {not_finite(mean)}", fontsize=6, va="center")
    dots = [(value / scale, y) for y, row in zip(at.tolist(), rows, strict=True) for value in _by_seed(row, key)]
    _draw_dots(axes, dots, "#000000")
    axes.set_yticks(at, [textwrap.fill(row.name, _MAX_LABEL) for row in rows])
    axes.grid(visible=False, axis="y")
