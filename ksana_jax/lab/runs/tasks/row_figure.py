"""The default figure of a task: a panel for each of up to three columns. Knows columns, not tasks."""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.lab.runs.figures import COLOURS, axis_title, bars, integer_ticks, legend, line_style
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, Scaled, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_PANELS = 3
_MAX_LABEL = 28  # characters of a line: longer ones would leave no room for bars


def draw_columns(figure: Figure, rows: Sequence[ResultRow], columns: Sequence[Column]) -> None:
    """Draws the columns that have a best value, or else the first columns; at most three."""
    shown = ([c for c in columns if c.best] or list(columns))[:_MAX_PANELS]
    measured = [row for row in rows if row.trials]
    if not shown or not measured:
        return
    if against_numbers(measured):
        panels = draw_panels(figure, measured, [(column.key, column.title, _unit(column)) for column in shown])
        legend(figure, panels[0])
        return
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for index, (axes, column) in enumerate(zip(panels, shown, strict=True)):
        draw_bars(axes, measured, column.key, COLOURS[1 + index], _unit(column))
        axes.set_xlabel(column.title)


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
    """Draws means and deviations of a summary key over the last key of the points, one line per value of other keys."""
    last = list(rows[0].point)[-1]
    lines: dict[str, list[ResultRow]] = defaultdict(list)
    for row in rows:
        others = words({k: v for k, v in row.point.items() if k != last})
        lines[", ".join([row.label] * bool(row.label) + others)].append(row)
    for index, (label, members) in enumerate(lines.items()):
        members.sort(key=lambda row: row.point[last])
        draw_means(axes, [row.point[last] for row in members], [(row, key) for row in members], index, label, scale)
    integer_ticks(axes, [row.point[last] for row in rows])


def draw_means(
    axes: Axes, x: Sequence[Any], found: Sequence[tuple[ResultRow, str]], index: int, label: str, scale: float = 1
) -> None:
    """Draws the index-th line of a panel: means of summary keys, and their deviations if there are any.

    Args:
      found: for each x a row and a key; a row without it leaves a gap. scale: size of the axis' unit.
    """
    means = [(math.nan if (mean := row.mean(key)) is None else mean) / scale for row, key in found]
    spread = [(row.sd(key) or 0.0) / scale for row, key in found]
    axes.errorbar(x, means, spread if any(spread) else None, label=label, marker="o", capsize=2, **line_style(index))


def draw_bars(axes: Axes, rows: Sequence[ResultRow], key: str, colour: str, scale: float = 1) -> None:
    """Draws a bar for each row: the mean of a summary key and its deviation, in units of size `scale`."""
    at = np.arange(len(rows))[::-1]
    means = [(row.mean(key) or 0.0) / scale for row in rows]
    spread = [(row.sd(key) or 0.0) / scale for row in rows]
    bars(axes, at.tolist(), means, 0.7, spread, color=colour, error_kw={"linewidth": 0.6})
    axes.set_yticks(at, [textwrap.fill(row.name, _MAX_LABEL) for row in rows])
    axes.grid(visible=False, axis="y")
