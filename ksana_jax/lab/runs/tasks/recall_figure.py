"""The figure of a recall experiment: heat maps over length and the swept option, or lines over that option."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.lab.runs.figures import legend, style_indices
from ksana_jax.lab.runs.tasks.change_figure import GREY, MAX_LABELS
from ksana_jax.lab.runs.tasks.results import ResultRow, words
from ksana_jax.lab.runs.tasks.row_figure import draw_means

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LENGTH = "settings.num_tokens"


def swept(rows: Sequence[ResultRow]) -> tuple[str, list[Any]]:
    """Returns the swept option and its values in the order measured; ("", []) if the rows have none or differ."""
    found = [_swept_of(row) for row in rows if row.trials]
    return found[0] if found and all(other == found[0] for other in found) else ("", [])


def _swept_of(row: ResultRow) -> tuple[str, list[Any]]:
    answers = [m for m in row.trials[0] if m["metric"] == "answer" and m["option"]]
    values = list({repr(m["value"]): m["value"] for m in answers}.values())
    return (answers[0]["option"], values) if answers else ("", [])


def draw(figure: Figure, rows: Sequence[ResultRow]) -> bool:
    """Draws the rows; returns False, and draws nothing, if no option was swept."""
    option, values = swept(rows)
    if not values:
        return False
    if len({row.point.get(LENGTH) for row in rows}) > 1:
        _heat_maps(figure, rows, option, values)
    else:
        _lines(figure, rows, option, values)
    return True


def _heat_maps(figure: Figure, rows: Sequence[ResultRow], option: str, values: Sequence[Any]) -> None:
    """Draws accuracy, one panel for each row without its length: lengths from left to right, values downwards."""
    panels: dict[str, dict[Any, ResultRow]] = defaultdict(dict)
    for row in rows:
        others = words({k: v for k, v in row.point.items() if k != LENGTH})
        name = ", ".join([row.label] * bool(row.label) + others)
        panels[name][row.point[LENGTH]] = row
    lengths = sorted({row.point[LENGTH] for row in rows})
    drawn = {
        name: np.array([[_mean(by_length.get(n), f"accuracy_{value}") for n in lengths] for value in values]) * 100
        for name, by_length in panels.items()
    }
    axes = figure.subplots(-(-len(panels) // 3), min(len(panels), 3), sharex=True, sharey=True, squeeze=False)
    image = None
    for panel, (name, found) in zip(axes.flat, drawn.items(), strict=False):
        image = panel.imshow(found, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        panel.set_title(name)
        panel.grid(visible=False)
        panel.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        panel.set_yticks(range(len(values)), [str(value) for value in values])
        _write(panel, found)
    for panel in axes.flat[len(panels) :]:
        panel.set_axis_off()
    figure.supxlabel("tokens", fontsize=7)
    figure.supylabel(option, fontsize=7)
    if image is not None:
        figure.colorbar(image, ax=axes, label="correct (%)")


def _write(panel: Axes, found: np.ndarray) -> None:
    for (row, column), value in np.ndenumerate(found):
        if not np.isnan(value):
            colour = "white" if value < 50 else "black"
            panel.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=6, color=colour)


def _lines(figure: Figure, rows: Sequence[ResultRow], option: str, values: Sequence[Any]) -> None:
    """Draws accuracy above and log-probability below, one line for each row. Seven have colours: the most accurate."""
    numbers = all(isinstance(value, (int, float)) for value in values)
    x = list(values) if numbers else list(range(len(values)))
    above, below = figure.subplots(2, 1, sharex=True)
    ranks = np.argsort([-(row.mean("accuracy") or 0) for row in rows], kind="stable")
    best = [rows[place] for place in sorted(ranks[:MAX_LABELS])]
    for axes, key, scale in ((above, "accuracy", 0.01), (below, "logprob", 1.0)):
        for row in (rows[place] for place in ranks[MAX_LABELS:]):
            y = [_mean(row, f"{key}_{value}") / scale for value in values]
            axes.plot(x, y, color=GREY, linewidth=0.6, label="other rows")
        for index, row in zip(style_indices([row.name for row in best]), best, strict=True):
            draw_means(axes, x, [(row, f"{key}_{value}") for value in values], index, row.name, scale)
    chance = [_mean(rows[0], f"chance_{value}") * 100 for value in values]
    above.plot(x, chance, color="#999999", linewidth=0.8, linestyle=":", label="chance")
    above.set_ylabel("correct (%)")
    above.set_ylim(-3, 103)
    below.set_ylabel("nats per answer token")
    below.set_xlabel(option)
    below.set_xticks(x, [str(value) for value in values])
    legend(figure, above)


def _mean(row: ResultRow | None, key: str) -> float:
    value = None if row is None else row.mean(key)
    return float("nan") if value is None else value
