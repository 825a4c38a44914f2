"""The style of figures: one paper column wide, colour-blind safe, printable fonts, no LaTeX, reproducible bytes."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.lab.runs import figure_fonts
from ksana_jax.lab.runs.tasks.results import SIMULATED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

COLUMN_INCHES = 3.25
_LEGEND_ROW_INCHES = 0.13
_UNLABELLED = re.compile(r"(_nolegend_|_child\d+|_container\d+)?")  # matplotlib's own labels; others are a user's

# Okabe and Ito's palette, "Color Universal Design" (2008), without its yellow, which is too pale for lines on white;
# wine, olive and indigo of Paul Tol's muted scheme ("Colour Schemes", 2021), and a grey.
COLOURS = (
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#999933", "#332288"),
    "#777777",
)
MARKERS = "os^Dv>PX<*p"
# Methods by their colour and marker, which are the same in all figures.
_METHODS = ["full", "sinks + window", "tova", "h2o", "snapkv", "window", "keydiff", "kvzip", "knorm", "r-kv", "random"]
KINDS = ("png", "pdf")
DASHES = ("-", "--", ":", "-.")

_STYLE: dict[Any, Any] = {
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7,
    "legend.fontsize": 6,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "lines.linewidth": 1.0,
    "lines.markersize": 3,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.3,
    "grid.alpha": 0.5,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "text.usetex": False,
    # Labels are user text, where $ does not start a formula.
    "text.parse_math": False,
    "savefig.dpi": 200,
}


def style_indices(names: Sequence[str]) -> list[int]:
    """Returns the index of each line's style: that of its method, or the next free one."""
    known = [re.sub(r"^\d+ ", "", name.removesuffix(SIMULATED).lower()) for name in names]
    first = [name in _METHODS and name not in known[:place] for place, name in enumerate(known)]
    fixed = [_METHODS.index(name) if is_first else None for name, is_first in zip(known, first, strict=True)]
    free = (index for index in itertools.count() if index not in fixed)
    return [next(free) if index is None else index for index in fixed]


def line_style(index: int) -> dict[str, Any]:
    """Returns colour and dashes of the index-th line; both vary, so overlapping lines show and 44 lines differ."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def marker_style(index: int) -> dict[str, Any]:
    """Returns colour and marker of the index-th line or point."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def explain(axes: Axes, text: str) -> None:
    """Says above an axes what its bars or dots are."""
    axes.set_title(text, loc="left", fontsize=5.5, color="#555555")


def byte_unit(largest: float) -> tuple[int, str]:
    """Returns the bytes and the name of the unit for an axis up to a number of bytes: MiB from 8 MiB on, else KiB."""
    return (2**20, "MiB") if largest >= 2**23 else (2**10, "KiB")


def log_ticks(*axes: Axis) -> None:
    """Labels a logarithmic axis with plain numbers at its powers of ten, and at 2 and 5 of each if there are few."""
    from matplotlib.ticker import LogLocator

    for axis in axes:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0,) if high > 30 * low else (1.0, 2.0, 5.0)))
        plain_numbers(axis)


def plain_numbers(*axes: Axis) -> None:
    """Labels the major ticks of an axis with plain numbers, and no others."""
    for axis in axes:
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


# Keys of grids as the titles of axes; others are their last part in words.
_TITLES = {
    "window": "window (tokens)",
    "num_sinks": "attention sinks (tokens)",
    "num_tokens": "length (tokens)",
    "prompt_tokens": "prompt (tokens)",
    "rate": "requests/s",
    "num_speculative_tokens": "draft length (tokens)",
    "batch_size": "batch size (requests)",
    "branch_length": "longest branch (tokens)",
}


def axis_title(key: str, values: Iterable[Any]) -> str:
    """Returns the title of an axis over a key of the grid, in words and with its unit."""
    name = key.rpartition(".")[2]
    if name == "budget":
        return "KV budget (tokens)" if all(isinstance(v, int) for v in values) else "KV budget (share of the sequence)"
    return _TITLES.get(name, name.replace("num_", "number of ").replace("_", " "))


_LABEL_POINTS = 7.0, 3.7  # height of a label, width of a character


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Writes labels to the right of the points (label, x, y, colour) of an axes, above each other where they overlap.

    Call it when limits and scales are set.
    """
    ends = [end for end in ends if math.isfinite(end[1] + end[2])]
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.2}
    given = {"textcoords": "offset points", "va": "center", "annotation_clip": False, "fontsize": 6, "bbox": box}
    drawn = [axes.annotate(label, (x, y), (7, 0), color=colour, **given) for label, x, y, colour in ends]
    for _ in range(2):  # the layout gives labels room, which moves their points
        axes.figure.canvas.draw()
        places = axes.transData.transform(np.array([end[1:3] for end in ends]).reshape(-1, 2)) * 72 / axes.figure.dpi
        heights = stacked([(x, y, _LABEL_POINTS[1] * len(end[0])) for (x, y), end in zip(places, ends, strict=True)])
        for text, (_, own), height in zip(drawn, places, heights, strict=True):
            text.set_position((7, height - own))


def stacked(labels: Sequence[tuple[float, float, float]]) -> list[float]:
    """Returns heights for labels (left end, height, width), in points: their own, or as far up as no two overlap."""
    heights, placed = [y for _, y, _ in labels], []
    for index in sorted(range(len(labels)), key=heights.__getitem__):
        left, height, width = labels[index]
        for other_left, other, other_width in placed:  # from the lowest up
            overlap = left < other_left + other_width and other_left < left + width
            if overlap and abs(other - height) < _LABEL_POINTS[0]:
                height = other + _LABEL_POINTS[0]
        heights[index] = height
        placed = sorted([*placed, (left, height, width)], key=lambda label: label[1])
    return heights


def legend(figure: Figure, *axes: Axes, ncols: int = 2) -> None:
    """Puts the labels of some axes above a figure, equal ones once; nothing if there are none.

    The labels take as many columns as fit the figure, at most `ncols`; it grows by their rows beyond the fourth.
    """
    found: dict[str, Any] = {}
    for some in axes:
        # Not get_legend_handles_labels, which leaves out every label that begins with an underscore.
        for artist in (*some.lines, *some.patches, *some.collections, *some.containers):
            if not _UNLABELLED.fullmatch(label := str(artist.get_label() or "")):
                found[label] = artist
    # Before version 3.10, matplotlib drops such labels here too; a space without width keeps them.
    labels = [re.sub("^_", "\N{ZERO WIDTH SPACE}_", label) for label in found]
    if not found:
        return
    for columns in range(ncols, 0, -1):
        made = figure.legend(found.values(), labels, loc="outside upper center", ncols=columns)
        if columns == 1 or made.get_window_extent().width <= figure.bbox.width:
            num_rows = -(-len(found) // columns)
            figure.set_figheight(figure.get_figheight() + _LEGEND_ROW_INCHES * max(num_rows - 4, 0))
            return
        made.remove()


def finish(figure: Figure) -> None:
    """Marks the infinite values of lines by arrows at the edge of their axes; NaN leaves a gap. A logarithmic axis
    without a value above 0 becomes linear."""
    for axes in figure.axes:
        for name in "xy":
            if getattr(axes, f"get_{name}scale")() == "log" and not has_positive(axes, name):
                getattr(axes, f"set_{name}scale")("linear")
        for line in list(axes.lines):
            # Not the ends of error bars, nor lines across the whole figure.
            if line.get_label() != "_nolegend_" and line.get_transform() == axes.transData:
                _mark_infinite(axes, line)


def has_positive(axes: Axes, name: str) -> bool:
    """True if a line has a finite value above 0 on an axis; true without lines."""
    found = [np.asarray(getattr(line, f"get_{name}data")(orig=False), float) for line in axes.lines]
    return not found or any(np.any(np.isfinite(values) & (values > 0)) for values in found)


def _mark_infinite(axes: Axes, line: Line2D) -> None:
    x, y = (np.asarray(values, float) for values in (line.get_xdata(orig=False), line.get_ydata(orig=False)))
    for infinite, finite, transform, marks in (
        (y, x, axes.get_xaxis_transform(), {1: "^", -1: "v"}),
        (x, y, axes.get_yaxis_transform(), {1: ">", -1: "<"}),
    ):
        for sign, marker in marks.items():
            some = finite[(infinite == sign * np.inf) & np.isfinite(finite)]
            edge = np.full(len(some), float(sign > 0))
            places = (some, edge) if infinite is y else (edge, some)
            style = {"marker": marker, "color": line.get_color(), "linestyle": "", "label": "_nolegend_"}
            if len(some):
                axes.plot(*places, transform=transform, clip_on=False, **style)


def render(draw: Callable[[Figure], None], height_inches: float) -> dict[str, bytes]:
    """Draws into a figure of column width and returns it as {"png": ..., "pdf": ...}.

    The same drawing gives the same bytes: no dates, no program versions.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    files = {}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(COLUMN_INCHES, height_inches), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        finish(figure)
        if figure_fonts.fit(figure):
            matplotlib.rcParams["pdf.fonttype"] = 3  # fonts of any format; type 42 takes TrueType only
        for kind, nothing in (
            ("png", {"Software": None}),
            ("pdf", {"CreationDate": None, "Producer": None, "Creator": None}),
        ):
            content = io.BytesIO()
            figure.savefig(content, format=kind, metadata=nothing)
            files[kind] = content.getvalue()
    return files
