"""The figure of a perplexity experiment, in two panels: perplexity above, live KV below.

Named variants over a grid of numbers, or on texts of one or two buckets of positions, have one panel; see
`change_figure`. More than ten lines are divided into panels of rows that hold about as much KV.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ksana_jax.lab.runs.figures import (
    byte_unit,
    has_positive,
    label_ends,
    legend,
    line_style,
    plain_numbers,
    style_indices,
)
from ksana_jax.lab.runs.tasks import change_figure
from ksana_jax.lab.runs.tasks.perplexity_report import live_blocks, method, perplexity
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, of_metric
from ksana_jax.lab.runs.tasks.row_figure import against_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MAX_LINES = 10


def draw(figure: Figure, rows: Sequence[ResultRow], headline: Column | None) -> None:
    """Draws lines over a grid of numbers, a point for each named variant on short texts, or one line per row over the
    position in the text."""
    measured = [row for row in rows if row.trials]
    on_grid = [row for row in measured if any(value is not None for value in row.point.values())]
    lines = all(method(row) == "stream" and (row.label or len(row.point) > 1) for row in on_grid)
    if headline is not None and lines and against_numbers(on_grid):
        return change_figure.draw_lines(figure, measured, headline)
    short = all(row.label and not row.point and len(bucket_nll(row, "all")) < 3 for row in measured)
    if headline is not None and len(measured) > 1 and short:
        return change_figure.draw_points(figure, measured, headline)
    if len(measured) > _MAX_LINES:
        return _draw_groups(figure, measured)
    above, below = figure.subplots(2, 1, sharex=True)
    _against_position(above, below, measured)
    _logarithmic(above)
    if has_positive(below, "y"):  # a window of one token holds nothing between steps
        below.set_yscale("log", base=2)
    below.set_ylabel(f"live KV ({_unit(measured)[1]})")
    plain_numbers(above.yaxis, below.yaxis)
    legend(figure, above)


def _draw_groups(figure: Figure, rows: Sequence[ResultRow]) -> None:
    """Draws perplexity over the position, at most eight rows in a panel, divided by KV if these are few groups; the
    row that others are compared with is in all panels."""
    bases = {row.baseline.name: row.baseline for row in rows if row.baseline is not None}
    base = [*bases.values()] if len(bases) == 1 else []
    others = [row for row in rows if row.name not in bases or not base]
    found: list[list[ResultRow]] = []
    for row in others:
        before = (found[-1][0].mean("live_kv_bytes") or 0) if found else math.inf
        near = math.isclose(row.mean("live_kv_bytes") or 0, before, rel_tol=0.2)
        found[-1:] = [[*found[-1], row]] if near else [*found[-1:], [row]]
    groups = [part[at : at + 8] for part in (found if len(found) < 5 else [others]) for at in range(0, len(part), 8)]
    panels = figure.subplots(len(groups), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    figure.set_figheight(1.5 * len(groups))
    for axes, members in zip(panels, groups, strict=True):
        drawn = [*base, *members]
        for row, index in zip(drawn, style_indices([row.name for row in drawn]), strict=True):
            axes.plot(*_curve(row, rows), label=row.name, **line_style(index))
        size, unit = byte_unit(held := max(row.mean("live_kv_bytes") or 0 for row in members))
        amount = f"{held / size:,.0f}" if held >= 100 * size else f"{held / size:.3g}"
        most = "" if len(found) < 5 else "up to "
        axes.set_title(f"{most}{amount} {unit} of KV", fontsize=6, loc="left")
        axes.set_ylabel("perplexity")
        _logarithmic(axes)
        plain_numbers(axes.yaxis)
    panels[-1].set_xlabel("position in the text (tokens)")
    for axes in panels:
        ends = [(str(x.get_label()), x.get_xdata()[-1], x.get_ydata()[-1], x.get_color()) for x in axes.lines]
        label_ends(axes, ends)


def _curve(row: ResultRow, rows: Sequence[ResultRow]) -> tuple[list[float], list[float]]:
    """Returns the middles of a row's buckets of positions, and the perplexities there."""
    size = next((m["bucket_tokens"] for m in row.trials[0] if m["metric"] == "nll"), 1)
    nll = _from_sample(row, rows) if method(row) == "recompute" else bucket_nll(row, "all")
    return [(bucket + 0.5) * size for bucket in sorted(nll)], [perplexity(nll[bucket]) for bucket in sorted(nll)]


def _logarithmic(axes: Axes) -> None:
    """Makes the y axis logarithmic, with enough ticks for a range of less than ten."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))


def _unit(rows: Sequence[ResultRow]) -> tuple[int, str]:
    """Returns bytes and name of the unit of the drawn KV."""
    drawn = (row.mean("live_kv_bytes") or row.mean("peak_kv_bytes") or 0 for row in rows)
    return byte_unit(max(drawn, default=0))


def _against_position(above: Axes, below: Axes, rows: Sequence[ResultRow]) -> None:
    unit_bytes, _ = _unit(rows)
    for index, row in zip(style_indices([row.name for row in rows]), rows, strict=True):
        style = line_style(index)
        curve = next(m for m in row.trials[0] if m["metric"] == "kv")
        scale = curve["block_bytes"] / unit_bytes
        if method(row) == "recompute":
            # Peak of the run over one window; between two tokens, nothing is held.
            below.axhline(curve["peak_blocks"] * scale, **style)
        else:
            # A text that fits one step is a point at its end.
            end = next(m["text_tokens"] for m in row.trials[0] if m["metric"] == "nll")
            held = [math.nan if row.simulated else b * scale for b in live_blocks(curve)]
            below.plot(curve["position"] or [end], held, marker="" if len(held) > 1 else "o", **style)
        label = row.name + (" (sampled)" if method(row) == "recompute" else "")
        positions, values = _curve(row, rows)
        above.plot(positions, values, label=label, marker="" if len(values) > 1 else "o", **style)
    above.set_ylabel("perplexity")
    below.set_xlabel("position in the text (tokens)")


def bucket_nll(row: ResultRow, subset: str) -> dict[int, float]:
    """Returns {bucket: mean negative log-likelihood per token, in nats} over all texts and seeds."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for m in of_metric([row], "nll"):
        if m["subset"] == subset:
            sums[m["bucket"]][0] += m["sum"]
            sums[m["bucket"]][1] += m["count"]
    return {bucket: total / count for bucket, (total, count) in sums.items()}


def _from_sample(row: ResultRow, rows: Sequence[ResultRow]) -> dict[int, float]:
    """Estimates a sampled row's curve over all positions: the most similar row's curve plus their difference on the
    sample. The few sampled tokens of a bucket vary with content, but their differences between two rows hardly do (the
    difference estimator of survey sampling)."""
    mine = bucket_nll(row, "sampled")
    best: tuple[float, dict[int, float]] | None = None
    for other in rows:
        sampled, every = bucket_nll(other, "sampled"), bucket_nll(other, "all")
        if not mine.keys() <= sampled.keys() & every.keys():
            continue
        distance = sum((mine[b] - sampled[b]) ** 2 for b in mine)
        if best is None or distance < best[0] or math.isnan(best[0]):
            best = distance, {b: every[b] + mine[b] - sampled[b] for b in mine}
    return best[1] if best else mine
