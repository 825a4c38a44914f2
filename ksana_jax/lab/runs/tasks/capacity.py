"""The largest rates of arrival under which objectives are kept, on simulated servers.

Rates are bisected with the same requests and scaled gaps; see `ksana_jax.lab.simulator.capacity`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.figures import legend, line_style, log_ticks
from ksana_jax.lab.runs.tasks.base import TrialContext, float_field
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, number, of_metric
from ksana_jax.lab.runs.tasks.simulated import SimulatedSettings, SimulatedTask, Simulation
from ksana_jax.lab.simulator.capacity import Search
from ksana_jax.lab.simulator.slo import SLO, percentile

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass
class CapacitySettings(SimulatedSettings):
    """Fields of `settings` in a capacity experiment.

    slo: {name: objectives}, at least one; objectives are {"ttft_p99": 2, "tpot_p99": 0.1} or the same as text. A limit
      without a percentile applies to each request; a share "attainment" of them must keep it (0.9). Metrics: ttft,
      tpot, e2e, latency_per_token.
    first_rate: requests per second at which the search begins.
    ratio: of neighbouring rates in the search, the resolution of the result.
    curve: metric and percentile that the figure draws over the rate.
    """

    slo: dict[str, Any] = dataclasses.field(default_factory=dict)
    first_rate: float = float_field(1.0, above=0)
    ratio: float = float_field(1.02, above=1, high=2)
    curve: str = "ttft_p50"


class CapacitySearch(SimulatedTask):
    """The task `capacity`. See the module's docstring."""

    Settings = CapacitySettings

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        settings = CapacitySettings(**config["settings"])
        if settings.rate is not None:
            raise ConfigError("settings.rate is what task 'capacity' searches: set first_rate")
        if not settings.slo:
            raise ConfigError('settings.slo is empty: give at least one, such as {fast: "ttft_p99=2,tpot_p99=0.1"}')
        for objectives in settings.slo.values():
            SLO.of(objectives)
        if SLO.of({settings.curve: 1}).limits[0].percent is None:
            raise ConfigError(f"settings.curve is {settings.curve!r}, must name a percentile, such as ttft_p50")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        settings = CapacitySettings(**trial.config["settings"])
        simulation = Simulation(trial.config, settings, trial.seed)
        search = Search(simulation.requests, settings.first_rate, ratio=settings.ratio, warm_up=settings.warm_up)
        for done, (name, objectives) in enumerate(settings.slo.items(), 1):
            found = search.capacity(slo := SLO.of(objectives))
            yield {
                "metric": "capacity",
                "sample": simulation.sample,
                "slo": name,
                "limits": slo.text,
                "rate": found.rate,
                "failed_rate": found.failed.rate,
                "num_judged": len(search.requests(found.failed.rate)),
                "reasons": list(found.failed.verdict.reasons),
            }
            trial.progress(done / len(settings.slo))
        [limit] = SLO.of({settings.curve: 1}).limits
        assert limit.percent is not None
        for rate in sorted(search.runs):
            value = percentile(search.runs[rate], limit.metric, limit.percent)
            yield {"metric": "probe", "rate": rate, "curve": settings.curve, "value": value}

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        return {f"rate, {m['slo']}": m["rate"] for m in measurements if m["metric"] == "capacity"}

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        keys = dict.fromkeys(key for row in rows for key in row.values)
        return [Column(key, f"requests/s at {key.removeprefix('rate, ')}", number(3), "max") for key in keys]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        limits = dict.fromkeys((m["slo"], m["limits"]) for m in of_metric(rows, "capacity"))
        said = ["Objectives: " + "; ".join(f"{name}: {text}" for name, text in limits) + "."] if limits else []
        if judged := [m["num_judged"] for m in of_metric(rows, "capacity") if "num_judged" in m]:
            said.append(f"Requests judged, after the warm-up: {min(judged):,}.")
        if len(rows) == 1:
            found = [m for m in of_metric(rows, "capacity") if m["rate"]]
            said += [f"{m['slo']}: {_reason(m)}." for m in found[: len({m["slo"] for m in found})]]
        none = [f"{row.name}, {m['slo']}: {_reason(m)}" for row, m in _zeros(rows)]
        return said + ["No rate keeps the objectives: " + ". ".join(none) + "."] * bool(none)

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws the metric of `curve` over all rates that were tried with the first seed, a line for each row."""
        axes = figure.subplots()
        name = ""
        for index, row in enumerate(row for row in rows if row.trials):
            points = [(m["rate"], m["value"]) for m in row.trials[0] if m["metric"] == "probe"]
            name = next((m["curve"] for m in row.trials[0] if m["metric"] == "probe"), name)
            axes.plot(*zip(*points, strict=True), marker=".", label=row.name, **line_style(index))
        metric, _, percent = name.rpartition("_p")
        axes.set(xscale="log", yscale="log", xlabel="requests/s", ylabel=f"{metric.replace('_', ' ')}, p{percent} (s)")
        log_ticks(axes.xaxis, axes.yaxis)
        legend(figure, axes)


def _reason(measured: Measurement) -> str:
    """Describes the rate that missed the objectives, and why."""
    return f"at {measured['failed_rate']:,.3g} requests/s, {'; '.join(measured['reasons'])}"


def _zeros(rows: Sequence[ResultRow]) -> list[tuple[ResultRow, Measurement]]:
    return [(row, m) for row in rows for m in of_metric([row], "capacity") if not m["rate"]]
