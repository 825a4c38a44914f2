"""Shows labels in any script: in fonts that are installed, or as codes where none has a character."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIRST = "DejaVu Sans"  # comes with matplotlib: most figures are the same on every machine
logger = logging.getLogger("ksana_jax")


def fit(figure: Figure) -> bool:
    """Gives the texts of a figure fonts that have their characters; returns whether any font is not matplotlib's own.

    A character that no installed font has becomes its code, such as \\u65e5, so that labels stay distinct.
    """
    from matplotlib.text import Text

    axes = [axis for one in figure.axes for axis in (one.xaxis, one.yaxis)]
    ticks = {axis: [label.get_text() for label in axis.get_ticklabels()] for axis in axes}
    texts = figure.findobj(Text)
    names, lacking = _fonts({char for text in texts for char in text.get_text() if not char.isascii()})
    if lacking:
        logger.warning("no installed font has %s: the figure shows codes", " ".join(sorted(lacking)))
    codes = str.maketrans({char: char.encode("unicode_escape").decode() for char in lacking})
    for text in texts if names or lacking else ():
        text.set_text(text.get_text().translate(codes))
        text.set_fontfamily([FIRST, *names])
    for axis, labels in ticks.items():
        if lacking & {*"".join(labels)}:  # else an axis writes the same labels again when it is drawn
            axis.set_ticks(axis.get_ticklocs(), [label.translate(codes) for label in labels])
        if names:
            axis.set_tick_params(labelfontfamily=[FIRST, *names])
    return bool(names)


def _fonts(chars: set[str]) -> tuple[list[str], set[str]]:
    """Returns the names of fonts that have what FIRST lacks of some characters, and the characters that none has."""
    from matplotlib.font_manager import findfont, fontManager, get_font

    names, lacking = [], _lacking(get_font(findfont(FIRST)), chars)
    plain_first = sorted(fontManager.ttflist, key=lambda e: (e.style != "normal", e.weight != 400, e.name, e.fname))
    for entry in plain_first if lacking else ():
        if entry.name.startswith("Last Resort"):  # a box for every character
            continue
        try:
            font = get_font(entry.fname)
            left = _lacking(font, lacking) if font.scalable else lacking
        except (OSError, RuntimeError):  # deleted since fonts were listed, or damaged
            continue
        if left != lacking:
            names.append(entry.name)
            lacking = left
        if not lacking:
            break
    return names, lacking


def _lacking(font: Any, chars: set[str]) -> set[str]:
    return {char for char in chars if not font.get_char_index(ord(char))}
