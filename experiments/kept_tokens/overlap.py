"""How many tokens do pairs of eviction methods both keep? Reads the masks that `ksana run kept_tokens` has saved.

    python -m experiments.kept_tokens.overlap [FOLDER]      of a run; this folder by default

It prints a table and writes overlap.png.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

CHOSEN = slice(4, 480)  # neither sinks nor recent
CONTEXT = 512


def masks_of(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tokens that each row has chosen: bool [texts, L, K, tokens]."""
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    names = {r["trial"]: r["label"] for r in records if "label" in r}
    found: dict[str, dict[str, np.ndarray]] = {}
    for record in records:
        if record.get("metric") == "kept":
            with np.load(folder / record["file"]) as texts:
                found.setdefault(names[record["trial"]], {}).update(texts)
    texts = sorted(next(iter(found.values())))
    return {name: np.stack([of[text][..., :CONTEXT][..., CHOSEN] for text in texts]) for name, of in found.items()}


def jaccard(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the overlap of [texts, L, K, tokens] by layer, mean over texts and heads: [L]."""
    return ((a & b).sum(-1) / (a | b).sum(-1)).mean(axis=(0, 2))


def by_chance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the overlap expected of two independent random choices of as many tokens."""
    size, one, two = a.shape[-1], a.sum(-1).mean(), b.sum(-1).mean()
    both = one * two / size
    return float(both / (one + two - both))


def pairs_of(masks: Mapping[str, np.ndarray]) -> dict[tuple[str, str], tuple[np.ndarray, float]]:
    """Returns the overlap by layer of each pair of methods, and the one expected by chance."""
    pairs = itertools.combinations([name for name in masks if name != "full"], 2)
    return {(a, b): (jaccard(masks[a], masks[b]), by_chance(masks[a], masks[b])) for a, b in pairs}


def main(folder: Path) -> None:
    from matplotlib.figure import Figure

    from ksana_jax.lab.runs.figures import label_ends

    found = pairs_of(masks_of(folder))
    print("| methods | overlap | least and most of a layer | by chance |\n|---|---:|---:|---:|")
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes, ends = figure.subplots(), []
    for (a, b), (layers, chance) in sorted(found.items(), key=lambda item: -item[1][0].mean()):
        print(f"| {a}, {b} | {layers.mean():.3f} | {layers.min():.2f} to {layers.max():.2f} | {chance:.3f} |")
        if layers.mean() > 2 * chance:
            [line] = axes.plot(layers, linewidth=1)
            ends.append((f"{a}, {b}", len(layers) - 1, layers[-1], line.get_color()))
        elif "random" not in (a, b):
            axes.plot(layers, linewidth=0.7, color="#bbbbbb")
    end = len(layers) - 1
    axes.axhline(chance, color="#555555", linestyle=":", linewidth=1)
    axes.set(xlabel="layer", ylabel="Jaccard overlap of the chosen tokens", ylim=(0, None))
    label_ends(axes, [*ends, ("other pairs", end, 1.5 * chance, "#888888"), ("by chance", end, chance, "#555555")])
    figure.savefig(Path(__file__).with_name("overlap.png"), dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
