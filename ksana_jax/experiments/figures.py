"""The style of figures: one paper column wide, colour-blind safe, printable fonts, no LaTeX, reproducible bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLUMN_INCHES = 3.25

# Okabe and Ito's palette, "Color Universal Design" (2008), without its yellow, which is too pale for lines on white.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
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
    # Labels are user text, in which $ does not start a formula.
    "text.parse_math": False,
    "savefig.dpi": 200,
}


def line_style(index: int) -> dict[str, Any]:
    """Returns colour and dashes of the index-th line; both vary, so overlapping lines show and 28 lines differ."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def integer_ticks(axes: Axes, values: Iterable[Any]) -> None:
    """Puts the x axis ticks at whole numbers if all values are whole numbers."""
    from matplotlib.ticker import MaxNLocator

    if all(isinstance(value, int) for value in values):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def log_ticks(*axes: Axis) -> None:
    """Labels a logarithmic axis with plain numbers at its powers of ten, and at 2 and 5 of each if there are few."""
    from matplotlib.ticker import LogLocator

    for axis in axes:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0,) if high > 30 * low else (1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


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
        for kind, nothing in (
            ("png", {"Software": None}),
            ("pdf", {"CreationDate": None, "Producer": None, "Creator": None}),
        ):
            content = io.BytesIO()
            figure.savefig(content, format=kind, metadata=nothing)
            files[kind] = content.getvalue()
    return files
