"""How figures look: one column of a paper wide, colour-blind cycle, fonts that print, no LaTeX; bytes that repeat."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_INCHES = 3.25

# Okabe and Ito's palette, "Color Universal Design" (2008), its yellow left out: too pale for a line on white.
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
    # Labels are text of the user's, in which $ begins no formula.
    "text.parse_math": False,
    "savefig.dpi": 200,
}


def line_style(index: int) -> dict[str, Any]:
    """Colour and dashes of the index-th line: both turn, so that lines on top of each other show, and 28 differ."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def integer_ticks(axes: Axes, values: Iterable[Any]) -> None:
    """Has the x axis tick at whole numbers if all values on it are."""
    from matplotlib.ticker import MaxNLocator

    if all(isinstance(value, int) for value in values):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


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
