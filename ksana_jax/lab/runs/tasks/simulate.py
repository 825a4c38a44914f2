"""Latency and throughput of requests that arrive over time, on one simulated server.

It runs the engine's scheduler and KV memory; only the time of steps is modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.figures import legend, log_ticks
from ksana_jax.lab.runs.tasks.results import Column, ResultRow, number
from ksana_jax.lab.runs.tasks.row_figure import against_numbers, draw_panels
from ksana_jax.lab.runs.tasks.simulated import LATENCIES, LOADS, SimulatedSettings, SimulatedTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Simulate(SimulatedTask):
    """The task `simulate`. See the module's docstring."""

    Settings = SimulatedSettings

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        if config["settings"]["servers"] > 1:
            raise ConfigError("settings.servers: task 'simulate' has one server, task 'route' has several")

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        found = [
            Column("requests_per_s", "requests/s", number(2)),
            Column("output_tokens_per_s", "output tokens/s", number(0)),
            *LATENCIES,
            *LOADS,
        ]
        # Columns that are always 0, or cannot occur, say nothing.
        optional = ("hit_rate", "preemptions", "utilisation")
        return [c for c in found if c.key not in optional or any(row.mean(c.key) for row in rows)]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws TTFT and hit rate over the last key of the grid, a line for each label."""
        measured = [row for row in rows if row.trials]
        if not against_numbers(measured):
            super().draw(figure, rows)
            return
        cached = any(row.mean("hit_rate") for row in measured)
        keys = [("ttft_p50_s", "TTFT p50 (ms)", 1e-3), ("ttft_p90_s", "TTFT p90 (ms)", 1e-3)]
        keys += [("hit_rate", "hit rate (%)", 0.01)] if cached else []
        panels = draw_panels(figure, measured, keys)
        for axes in panels[:2]:  # of times
            axes.set_yscale("log")
            log_ticks(axes.yaxis)
        legend(figure, panels[0])
