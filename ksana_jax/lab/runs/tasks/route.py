"""Latency, hit rate and balance of several servers behind a router, simulated.

Policies and ledger are `ksana route`'s; servers run the real engine.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ksana_jax.lab.runs.figures import COLOURS, log_ticks
from ksana_jax.lab.runs.tasks.base import float_field, int_field
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, number, words
from ksana_jax.lab.runs.tasks.simulated import LATENCIES, LOADS, SimulatedSettings, SimulatedTask
from ksana_jax.lab.simulator.fleet import NETWORK_S

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass
class RouteSettings(SimulatedSettings):
    """Fields of `settings` in a route experiment."""

    servers: int = int_field(4, 1, 100_000)
    network_s: float = float_field(NETWORK_S, low=0)


class Route(SimulatedTask):
    """The task `route`. See the module's docstring."""

    Settings = RouteSettings

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("requests_per_s", "requests/s", number(2)),
            *LATENCIES,
            Column("imbalance", "max / mean load", number(2)),
            *LOADS,
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Times are those of the client. Load: seconds in which a server computed, that is after hits; largest over "
            "mean of the servers.",
            *super().notes(rows),
        ]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws TTFT p50 of each policy, its median and range over seeds; a panel for each of the other settings."""
        groups = {label: [r for r in members if r.trials] for label, members in _groups(rows).items()}
        names = list(dict.fromkeys(_policy(row) for members in groups.values() for row in members))
        num_columns = 2 if len(groups) > 3 else 1
        panels = figure.subplots(-(-len(groups) // num_columns), num_columns, sharey=True, squeeze=False)
        figure.set_figheight(len(panels) * (0.5 + 0.1 * len(names)))
        for axes in panels.flat[len(groups) :]:
            axes.set_axis_off()
        for axes, (label, members) in zip(panels.flat, groups.items(), strict=False):
            for row in members:
                y, ttft_ms = names.index(_policy(row)), [1000 * s for s in row.values["ttft_p50_s"]]
                axes.plot([min(ttft_ms), max(ttft_ms)], [y, y], color=COLOURS[1], linewidth=0.8)
                axes.plot(statistics.median(ttft_ms), y, "o", color=COLOURS[1])
            axes.set_xscale("log")
            log_ticks(axes.xaxis)
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.set_title(label, fontsize=6)
        figure.supxlabel("TTFT p50 (ms), median and range over seeds", fontsize=7)


def _policy(row: ResultRow) -> str:
    """Returns the policy of a row: from the grid, or its label's last part."""
    found = row.point.get("settings.policy", row.label.rpartition(", ")[2])
    if not isinstance(found, dict):
        return str(found)
    others = [f"{key} {value}" for key, value in found.items() if key != "name"]
    return " ".join([str(found.get("name", "")).rpartition(":")[2].lower(), *others])


def _groups(rows: Sequence[ResultRow]) -> dict[str, list[ResultRow]]:
    """Groups rows by their settings other than the policy."""
    found: dict[str, list[ResultRow]] = {}
    for row in rows:
        label = row.label if "settings.policy" in row.point else row.label.rpartition(", ")[0]
        others = words({k: v for k, v in row.point.items() if k != "settings.policy"})
        found.setdefault(", ".join([label] * bool(label) + others), []).append(row)
    return found
