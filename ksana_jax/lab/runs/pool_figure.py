"""Draws a pool over time: owners of blocks after each step, utilisation, and bytes moved. Knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ksana_jax.engine.inspect.pool_trace import BUSY, CACHED, FREE, Column
from ksana_jax.lab.runs.figures import COLOURS, byte_unit, line_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDEST = 1200  # maximum number of steps in a picture
_STATES = {FREE: "#FFFFFF", CACHED: "#C8C8C8", BUSY: "#7F7F7F"}
_SHARED = 0.5  # of a colour's brightness


def palette() -> np.ndarray:
    """Returns the colours [colours, 3] that requests cycle through: all hues but black, then their pale versions."""
    from matplotlib.colors import to_rgb

    hues = np.array([to_rgb(c) for c in COLOURS[1:]])
    return np.concatenate([hues, 1 - 0.45 * (1 - hues)])


def image(columns: Sequence[Column], tier: str, by_owner: bool = False) -> np.ndarray:
    """Returns an image [blocks, steps, 3], block ids upwards to the highest ever used, at most _WIDEST steps.

    Args:
      by_owner: order the blocks of a step by request, then cached ones, instead of by id.
    """
    from matplotlib.colors import to_rgb

    colours = palette()
    steps = np.array([c.step for c in columns])
    shown = np.linspace(1, steps[-1], min(int(steps[-1]), _WIDEST))
    pools = [columns[i].pools[tier] for i in np.searchsorted(steps, shown, side="right") - 1]
    owners = np.stack([p.owners for p in pools], axis=1)
    shared = np.stack([p.shared for p in pools], axis=1)
    if by_owner:
        last = np.where(owners == FREE, 2**30 + 2, 2**30 + (owners == CACHED))
        place = np.where(owners >= 0, 2 * owners + ~shared, last)
        order = np.argsort(place, axis=0, kind="stable")
        owners, shared = np.take_along_axis(owners, order, axis=0), np.take_along_axis(shared, order, axis=0)
    used = np.flatnonzero((owners != FREE).any(axis=1))
    top = int(used[-1]) + 1 if len(used) else 1
    owners, shared = owners[:top], shared[:top]
    picture = colours[np.maximum(owners, 0) % len(colours)]
    for state, colour in _STATES.items():
        picture[owners == state] = to_rgb(colour)
    picture[shared & (owners >= 0)] *= _SHARED
    return picture


def draw(figure: Figure, columns: Sequence[Column]) -> None:
    """Draws the device's pool by owner and by block, the host's if used, their utilisation, and bytes moved."""
    tiers = [t for t in columns[0].pools if t == "device" or any((c.pools[t].owners != FREE).any() for c in columns)]
    moved = {way: np.array([c.moved_bytes[way] for c in columns]) for way in columns[0].moved_bytes}
    moved = {way: amount for way, amount in moved.items() if amount[-1]}
    pictures = [("device", True), ("device", False)] + [("host", True)] * ("host" in tiers)
    ratios = [2.0, 2.0, 1.2][: len(pictures)] + [1.1] + [0.9] * bool(moved)
    panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
    last = columns[-1].step
    for axes, (tier, by_owner) in zip(panels, pictures, strict=False):
        picture = image(columns, tier, by_owner)
        extent = (0.5, last + 0.5, -0.5, len(picture) - 0.5)
        axes.imshow(picture, origin="lower", aspect="auto", interpolation="nearest", extent=extent)
        axes.set_ylabel(f"{tier}, " + ("blocks\nby owner" if by_owner else "block id"))
        axes.grid(False)
    _owners_legend(figure, columns)
    steps = [c.step for c in columns]
    _levels(panels[len(pictures)], columns, steps, tiers)
    if moved:
        _moves(panels[-1], steps, moved)
    panels[-1].set_xlabel("step")
    panels[-1].set_xlim(0.5, last + 0.5)
    figure.align_ylabels(list(panels))


def _levels(axes: Axes, columns: Sequence[Column], steps: list[int], tiers: list[str]) -> None:
    for index, tier in enumerate(tiers):
        held = [100 * c.pools[tier].held / len(c.pools[tier].owners) for c in columns]
        axes.step(steps, held, where="mid", label=f"held, {tier}", **line_style(index))
    waste = [100 * c.pools["device"].fragmentation for c in columns]
    axes.step(steps, waste, where="mid", label="waste in last blocks", **line_style(2))
    axes.set_ylim(0, 100)
    axes.set_ylabel("%")
    _legend_above(axes)


def _moves(axes: Axes, steps: list[int], moved: dict[str, np.ndarray]) -> None:
    scale, unit = byte_unit(max(a[-1] for a in moved.values()))
    for index, (way, amount) in enumerate(moved.items()):
        axes.step(steps, amount / scale, where="mid", label=way, **line_style(index + 3))
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"moved ({unit})")
    _legend_above(axes)


def _legend_above(axes: Axes) -> None:
    # Placed over the lines, it would hide them.
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.95), ncols=3, handlelength=1.8, columnspacing=1.0)


def _owners_legend(figure: Figure, columns: Sequence[Column]) -> None:
    from matplotlib.patches import Patch

    colours = palette()
    pools = [p for c in columns for p in c.pools.values()]
    patches = [Patch(facecolor=tuple(colours[i]), label=f"request {i + 1}") for i in range(2)]
    patches.append(Patch(facecolor=tuple(colours[0] * _SHARED), label="shared (darker)"))
    for state, name in ((CACHED, "cached"), (BUSY, "moving")):
        if any((p.owners == state).any() for p in pools):
            patches.append(Patch(facecolor=_STATES[state], label=name))
    patches.append(Patch(facecolor="white", edgecolor="#999999", linewidth=0.4, label="free"))
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), handlelength=1, columnspacing=1.0)
