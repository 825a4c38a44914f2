"""The figure of a perplexity experiment, in two panels: perplexity above, live KV below.

Named variants over a grid of numbers have perplexity over these numbers above and over live KV below; named variants
on texts of one or two buckets of positions have one panel, perplexity over live KV, or over the bytes of weights where
they alone differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ksana_jax.lab.runs.figures import axis_title, byte_unit, has_positive, legend, line_style, plain_numbers
from ksana_jax.lab.runs.significance import baseline_change
from ksana_jax.lab.runs.tasks import change_figure
from ksana_jax.lab.runs.tasks.perplexity_report import (
    differ,
    front,
    is_labelled_grid,
    live_blocks,
    method,
    perplexity,
    spans,
)
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, of_metric
from ksana_jax.lab.runs.tasks.row_figure import against_numbers, draw_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(figure: Figure, rows: Sequence[ResultRow], headline: Column | None) -> None:
    """Draws losses against a baseline, or one line per row over the position in the text or, for a grid of numbers,
    lines over its last key."""
    measured = [row for row in rows if row.trials]
    changes = headline is not None and any(baseline_change(row, headline.key) for row in measured)
    on_grid = [row for row in measured if any(value is not None for value in row.point.values())]
    if is_labelled_grid(measured):
        if changes and headline is not None:
            change_figure.draw_lines(figure, on_grid, headline)
        else:
            _at_equal_bytes(figure, on_grid)
        return
    if len(measured) > 1 and all(row.label and not row.point and _num_buckets(row) < 3 for row in measured):
        if changes and headline is not None:
            change_figure.draw_points(figure, measured, headline)
            return
        _over_bytes(axes := figure.subplots(), measured)
        legend(figure, axes)
        return
    above, below = figure.subplots(2, 1, sharex=True)
    if _is_grid(measured):
        _against_last_key(above, below, measured)
    else:
        _against_position(above, below, measured)
        _logarithmic(above)
    if has_positive(below, "y"):  # a window of one token holds nothing between steps
        below.set_yscale("log", base=2)
    below.set_ylabel(f"live KV ({_unit(measured)[1]})")
    plain_numbers(above.yaxis, below.yaxis)
    legend(figure, above)


def _at_equal_bytes(figure: Figure, rows: Sequence[ResultRow]) -> None:
    """Draws a line for each variant, over the grid's key above, over live KV below; rings mark the Pareto front."""
    above, below = figure.subplots(2, 1)
    (key,) = rows[0].point
    low, high = spans(rows, "ppl_")[-1]
    ppl, (size, unit) = f"ppl_{low}_{high}", _unit(rows)
    draw_lines(above, rows, ppl)
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        lines[row.label].append(_point(row, ppl, size))
    for index, points in enumerate(lines.values()):
        below.plot(*zip(*sorted(points), strict=True), marker="o", **line_style(index))
    ring = {"marker": "o", "markersize": 7, "markerfacecolor": "none", "linestyle": "", "color": "#888888"}
    below.plot(*zip(*(_point(row, ppl, size) for row in front(rows)), strict=True), **ring)
    below.set_xscale("log", base=2)
    given = [row.point[key] for row in rows]
    if min(given) > 0 and max(given) >= 8 * min(given):
        above.set_xscale("log", base=2)
        above.set_xticks(sorted(set(given)))
    above.set_xlabel(axis_title(key, given))
    below.set_xlabel(f"live KV ({unit}); rings: least for their perplexity")
    for axes in (above, below):
        _logarithmic(axes)
        axes.set_ylabel(f"ppl, positions {low:,}–{high - 1:,}")
        plain_numbers(axes.xaxis, axes.yaxis)
    legend(figure, above)


def _point(row: ResultRow, ppl: str, unit_bytes: int) -> tuple[float, float]:
    """Returns a row's live KV, in a unit, and its perplexity."""
    return (row.mean("live_kv_bytes") or math.nan) / unit_bytes, row.mean(ppl) or math.nan


def _logarithmic(axes: Axes) -> None:
    """Makes the y axis logarithmic, with enough ticks for a range of less than ten."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))


def _unit(rows: Sequence[ResultRow]) -> tuple[int, str]:
    """Returns bytes and name of the unit of the drawn KV."""
    drawn = (row.mean("live_kv_bytes") or row.mean("peak_kv_bytes") or 0 for row in rows)
    return byte_unit(max(drawn, default=0))


def _num_buckets(row: ResultRow) -> int:
    return len(bucket_nll(row, "all"))


def _over_bytes(axes: Axes, rows: Sequence[ResultRow]) -> None:
    """Draws a point for each variant, its perplexity at the last positions over its live KV or its weights."""
    low, high = spans(rows, "ppl_")[-1]
    by_weights = differ(rows, "weight_bytes") and not differ(rows, "live_kv_bytes")
    key = "weight_bytes" if by_weights else "live_kv_bytes"
    size, unit = byte_unit(max(row.mean(key) or 0 for row in rows))
    for index, row in enumerate(rows):
        x, y = (row.mean(key) or math.nan) / size, row.mean(f"ppl_{low}_{high}") or math.nan
        style = {"color": line_style(index)["color"], "marker": "osD^v<>P*X"[index % 10]}
        axes.plot([x], [y], linestyle="", markersize=5, label=row.label, **style)
    axes.set_xscale("log", base=2)
    shown = [y for row in rows if math.isfinite(y := row.mean(f"ppl_{low}_{high}") or math.nan)]
    if shown and max(shown) > 10 * min(shown):
        _logarithmic(axes)
    axes.set_xlabel(f"{'weights' if by_weights else 'live KV'} ({unit})")
    axes.set_ylabel(f"ppl, positions {low:,}–{high - 1:,}")
    plain_numbers(axes.xaxis, axes.yaxis)


def _is_grid(rows: Sequence[ResultRow]) -> bool:
    """True if lines go over the last key: the grid has two or more keys, all numbers, and all rows streamed."""
    if not rows or len(rows[0].point) < 2 or any(row.label or method(row) != "stream" for row in rows):
        return False
    return against_numbers(rows)


def _against_last_key(above: Axes, below: Axes, rows: Sequence[ResultRow]) -> None:
    low, high = spans(rows, "ppl_")[-1]
    draw_lines(above, rows, f"ppl_{low}_{high}")
    draw_lines(below, rows, "live_kv_bytes", scale=_unit(rows)[0])
    above.set_ylabel(f"ppl, positions {low:,}–{high - 1:,}")
    key = list(rows[0].point)[-1]
    below.set_xlabel(axis_title(key, [row.point[key] for row in rows]))


def _against_position(above: Axes, below: Axes, rows: Sequence[ResultRow]) -> None:
    size = next((m["bucket_tokens"] for row in rows for m in row.trials[0] if m["metric"] == "nll"), 1)
    unit_bytes, _ = _unit(rows)
    for index, row in enumerate(rows):
        style = line_style(index)
        curve = next(m for m in row.trials[0] if m["metric"] == "kv")
        scale = curve["block_bytes"] / unit_bytes
        if method(row) == "recompute":
            nll = _from_sample(row, rows)
            # Peak of the run over one window; between two tokens, nothing is held.
            below.axhline(curve["peak_blocks"] * scale, **style)
        else:
            nll = bucket_nll(row, "all")
            # A text that fits one step is a point at its end.
            end = next(m["text_tokens"] for m in row.trials[0] if m["metric"] == "nll")
            held = [math.nan if row.simulated else b * scale for b in live_blocks(curve)]
            below.plot(curve["position"] or [end], held, marker="" if len(held) > 1 else "o", **style)
        buckets = sorted(nll)
        label = row.name + (" (sampled)" if method(row) == "recompute" else "")
        above.plot([(b + 0.5) * size for b in buckets], [perplexity(nll[b]) for b in buckets], label=label, **style)
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
