"""Draws which tokens of a text each layer has kept: positions x layers, see `CompletionOutput.kept_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(figure: Figure, kept: np.ndarray, heads: Sequence[int] | None = None) -> None:
    """Draws the share of KV heads that keep a token, or one panel for each of some heads.

    Args:
      kept: bool [L, K, T]. heads: None draws their mean.
    """
    shown = {"layer": kept.mean(axis=1)} if heads is None else {f"layer, head {head}": kept[:, head] for head in heads}
    panels = figure.subplots(len(shown), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (label, panel) in zip(panels, shown.items(), strict=True):
        axes.imshow(panel, cmap="Greys", vmin=0, vmax=1, aspect="auto", origin="lower", interpolation="none")
        axes.set_ylabel(label)
    panels[-1].set_xlabel("position")
