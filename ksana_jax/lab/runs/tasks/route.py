"""Latency, hit rate and balance of several servers behind a router, simulated.

Policies and ledger are `ksana route`'s; servers run the real engine.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ksana_jax.lab.runs.figures import COLOURS, legend, log_ticks
from ksana_jax.lab.runs.tasks.base import float_field, int_field
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, number, words
from ksana_jax.lab.runs.tasks.simulated import LATENCIES, LOADS, SimulatedSettings, SimulatedTask
from ksana_jax.lab.simulator.fleet import NETWORK_S

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One for each of 14 policies.
_MARKS = [{"color": COLOURS[i % 7], "marker": "os^vDPX<>*hp8d"[i]} for i in range(14)]


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
        """Draws TTFT p50 over hit rate, one marker for each policy and one panel for each of the other settings:
        medians over seeds, and the range of TTFT."""
        groups = {label: [r for r in members if r.trials] for label, members in _groups(rows).items()}
        shape = (len(groups), 1) if len(groups) < 4 else (-(-len(groups) // 2), 2)
        panels = figure.subplots(*shape, squeeze=False).reshape(-1)
        for axes in panels[len(groups) :]:
            axes.set_axis_off()
        names = list(dict.fromkeys(_policy(row) for members in groups.values() for row in members))
        for axes, (label, members) in zip(panels, groups.items(), strict=False):
            for row in members:
                index = names.index(_policy(row))
                mark, ttft_ms = _MARKS[index % len(_MARKS)], [1000 * s for s in row.values["ttft_p50_s"]]
                x = 100 * statistics.median(row.values.get("hit_rate", [0]))
                axes.plot([x, x], [min(ttft_ms), max(ttft_ms)], color=mark["color"], linewidth=0.8)  # over seeds
                axes.plot(x, statistics.median(ttft_ms), **mark, linestyle="", label=_policy(row))
            axes.set_yscale("log")
            log_ticks(axes.yaxis)
            axes.set_title(label, fontsize=6)
        figure.supylabel("TTFT p50 (ms)", fontsize=7)
        figure.supxlabel("hit rate (%)", fontsize=7)
        legend(figure, *panels, ncols=3)


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
