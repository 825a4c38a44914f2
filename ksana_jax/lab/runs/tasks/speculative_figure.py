"""The figure of the task `speculative`: tokens per forward and speed-up, next to the formula's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.lab.runs.figures import legend, line_style
from ksana_jax.lab.runs.tasks.results import ResultRow, words
from ksana_jax.lab.runs.tasks.row_figure import against_numbers, draw_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "os^Dv*"


def expected_length(alpha: float, num_drafts: int) -> float:
    """Returns the mean tokens of a step with num_drafts draft tokens, each accepted with probability alpha if those
    before it are: (1 - alpha^(K+1)) / (1 - alpha), arXiv:2211.17192, equation 1."""
    return sum(alpha**place for place in range(num_drafts + 1))


def draw(figure: Figure, rows: Sequence[ResultRow]) -> bool:
    """Draws lines over the last key of the grid, with the formula's as dots; returns False, and draws nothing, where
    it has no numbers."""
    if rows and all(row.mean("nll_with") is not None for row in rows):
        _draw_quality(figure, rows)
        return True
    if not against_numbers(rows):
        return False
    key = list(rows[0].point)[-1].rpartition(".")[2]
    above, below = draw_panels(figure, rows, [("per_forward", "tokens/forward", 1), ("gain", "speed-up (×)", 1)])
    below.axhline(1, color="0.2", linewidth=0.6)
    if key == "num_speculative_tokens":
        _draw_formula(above, below, rows)
    if key == "batch_size":
        below.set_xscale("log", base=2)
        below.xaxis.set_major_formatter("{x:g}")
    legend(figure, above)
    return True


def _draw_quality(figure: Figure, rows: Sequence[ResultRow]) -> None:
    """Draws the speed-up over the loss of texts, for methods that change texts.

    Each label has a panel, each choice of the grid's keys but the last a line, and each value of the last key a mark.
    """
    labels, lines, marks = (list(dict.fromkeys(found)) for found in zip(*map(_choices, rows), strict=True))
    panels = figure.subplots(len(labels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes in panels:
        axes.axhline(1, color="0.2", linewidth=0.6)
        axes.set_ylabel("speed-up (×)")
    panels[-1].set_xlabel("nats per token under the target")
    for label, axes in zip(labels, panels, strict=True):
        axes.set_title(label)
        for index, line in enumerate(lines):
            found = [row for row in rows if _choices(row)[:2] == (label, line)]
            losses, gains = ([row.mean(key) or math.nan for row in found] for key in ("nll_with", "gain"))
            axes.plot(losses, gains, zorder=2, **line_style(1 + index))
            for row, loss, gain in zip(found, losses, gains, strict=True):
                mark = _MARKS[marks.index(_choices(row)[2]) % len(_MARKS)]
                axes.plot(loss, gain, marker=mark, **line_style(1 + index))
        plain = [loss for row in rows if row.label == label and (loss := row.mean("nll_without")) is not None]
        axes.axvline(sum(plain) / len(plain), color="0.2", linewidth=0.6)
    keys = [panels[0].plot([], [], label=line, **line_style(1 + index))[0] for index, line in enumerate(lines) if line]
    for mark, value in zip(_MARKS, marks, strict=False):
        keys += panels[0].plot([], [], color="0.4", marker=mark, linestyle="", label=value)
    figure.legend(handles=keys, loc="outside upper center", ncols=2)


def _choices(row: ResultRow) -> tuple[str, str, str]:
    """Returns a row's label, its values of the grid's keys but the last, and its value of that."""
    *others, last = [""] * (not row.point) + words(row.point)
    return row.label, ", ".join(others), last


def _draw_formula(above: Axes, below: Axes, rows: Sequence[ResultRow]) -> None:
    last = list(rows[0].point)[-1]
    points = sorted({row.point[last] for row in rows})
    crosses: dict[str, Any] = {"color": "0.4", "marker": "x", "linestyle": "", "zorder": 3}
    for row in rows:
        if (formula := row.mean("formula")) is not None:
            below.plot(row.point[last], formula, **crosses)
    for row in rows:
        alpha = row.mean("alpha")
        if row.point[last] == points[0] and alpha is not None:
            above.plot(points, [expected_length(alpha, k) for k in points], **crosses)
    above.plot([], [], label="formula", **crosses)
