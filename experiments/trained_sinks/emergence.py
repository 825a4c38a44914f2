"""How sinks emerge in training: `python -m experiments.trained_sinks.emergence FOLDER OUT`.

Reads the train_log.jsonl of each model below FOLDER, finished or not. Writes OUT/emergence.jsonl, .md, .png and .pdf.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ksana_jax.core.files import write_atomic
from ksana_jax.lab.runs import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT = ("step", "tokens", "heldout_loss", "sink_1", "first_token_attention", "sink_logit_attention", "recall_accuracy")
# Drawn fields of a record, and their axis labels.
PANELS = (
    (lambda record: record["sink_1"], "Sink_1"),
    (lambda record: _mean(record.get("sink_logit_attention")), "attention to\nsink logits"),
    (lambda record: record["heldout_loss"], "held-out loss"),
)


def read_logs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the evaluations of each model below a folder, by the model's name.

    Raises:
      FileNotFoundError: no model has one.
    """
    found = {}
    for path in sorted(folder.glob("*/train_log.jsonl")):
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if kept := [{name: r[name] for name in KEPT if name in r} for r in records if "sink_1" in r]:
            found[path.parent.name] = kept
    if not found:
        raise FileNotFoundError(f"{folder}/*/train_log.jsonl: no evaluation of any model")
    return found


def draw(figure: Figure, logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draws each measurement that any of the models has, over the tokens seen."""
    panels = [
        (measure, label)
        for measure, label in PANELS
        if any(measure(r) is not None for r in itertools.chain(*logs.values()))
    ]
    axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for panel, (measure, label) in zip(axes, panels, strict=True):
        for index, (name, records) in enumerate(logs.items()):
            points = [(r["tokens"] / 1e6, value) for r in records if (value := measure(r)) is not None]
            if points:
                panel.plot(*zip(*points, strict=True), **figures.line_style(index), label=name)
        panel.set_ylabel(label)
        panel.legend()
    axes[-1].set_xlabel("million tokens seen")


def table(logs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns the last evaluation of each model as a Markdown table."""
    lines = ["| model | tokens (M) | held-out loss | Sink_1 | attention to sink logits |", "|---|---:|---:|---:|---:|"]
    for name, records in logs.items():
        last = records[-1]
        given_up = _mean(last.get("sink_logit_attention"))
        shown = "—" if given_up is None else f"{given_up:.3f}"
        lines.append(
            f"| {name} | {last['tokens'] / 1e6:.1f} | {last['heldout_loss']:.3f} | {last['sink_1']:.3f} | {shown} |"
        )
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def main(folder: str, out: str) -> None:
    """Writes records, table and figure of the models below a folder."""
    logs, target = read_logs(Path(folder)), Path(out)
    target.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"model": name, **record}) for name, records in logs.items() for record in records]
    write_atomic(target / "emergence.jsonl", "\n".join(lines) + "\n")
    write_atomic(target / "emergence.md", table(logs))
    for kind, content in figures.render(lambda figure: draw(figure, logs), height_inches=4).items():
        write_atomic(target / f"emergence.{kind}", content)
    print(table(logs), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
