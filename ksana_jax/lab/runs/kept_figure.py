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
    panels = [kept.mean(axis=1)] if heads is None else [kept[:, head] for head in heads]
    drawn = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for number, (axes, panel) in enumerate(zip(drawn, panels, strict=True)):
        image = axes.imshow(panel, cmap="Greys", vmin=0, vmax=1, aspect="auto", origin="lower", interpolation="none")
        axes.set_ylabel("layer" if heads is None else f"layer, head {heads[number]}")
        if heads is None:
            figure.colorbar(image, ax=axes, label="KV heads that keep it")
    drawn[-1].set_xlabel("position")
