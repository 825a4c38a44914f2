"""Prompt tokens that a simulated server of a hybrid computes, by the policy that decides where it caches states.

Tokens are counts of the real scheduler and prefix cache; only the time of steps is modelled, and no result depends on
it but the order of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.tasks.base import TrialContext
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, Scaled, number, percent
from ksana_jax.lab.runs.tasks.simulated import ONE_ENGINE, SimulatedSettings, SimulatedTask, Simulation
from ksana_jax.lab.simulator.fleet import MakeServer
from ksana_jax.lab.simulator.one_engine import SimEngine
from ksana_jax.loading.config_json import load_config


class Counted(Simulation):
    """A simulation that keeps its servers, whose engines have counted."""

    def __init__(self, config: Mapping[str, Any], settings: SimulatedSettings, seed: int):
        super().__init__(config, settings, seed)
        self.servers: list[SimEngine] = []

    def _make_server(self) -> MakeServer:
        make = super()._make_server()

        def kept(events: Any, **calls: Any) -> SimEngine:
            self.servers.append(server := make(events, **calls))
            return server

        return kept


class StateCache(SimulatedTask):
    """The task of this study. See the module's docstring."""

    Settings = SimulatedSettings

    def check(self, config: Mapping[str, Any]) -> None:
        super().check(config)
        if load_config(config["model"]).recurrent is None:
            raise ConfigError(f"model {config['model']} has no recurrent layers, whose states could be cached")
        if not config["engine"]["enable_prefix_caching"]:
            raise ConfigError("engine.enable_prefix_caching is false, must be true")
        if config["settings"]["server"] != ONE_ENGINE or config["settings"]["servers"] > 1:
            raise ConfigError(f"settings.server must be {ONE_ENGINE!r}, and settings.servers 1")

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        simulation = Counted(trial.config, SimulatedSettings(**trial.config["settings"]), trial.seed)
        measured = simulation.measure()
        [server] = simulation.servers
        memory, counted = server.engine.memory, server.engine.memory.counters
        assert memory.states is not None
        layout = server.engine.scheduler.layout
        yield {
            **measured,
            "prompt_tokens": counted.queried_tokens,
            "computed_tokens": counted.queried_tokens - counted.hit_tokens,
            "found": counted.hit_tokens / counted.queried_tokens,
            "found_keys": counted.key_tokens / counted.queried_tokens,
            "snapshots": counted.snapshots,
            "replaced_states": counted.replaced_states,
            "num_steps": len(server.engine.records),
            "num_slots": memory.states.pool.num_blocks,
            "states_bytes": layout.states.nbytes if layout.states else 0,
        }

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("computed_tokens", "prompt tokens computed, thousands", Scaled(1e-3, 1), "min"),
            Column("found", "found, %", percent(), "max"),
            Column("found_keys", "keys and values found, %", percent()),
            Column("snapshots", "states cached", number(0)),
            Column("replaced_states", "replaced", number(0)),
            Column("num_steps", "steps", number(0)),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        return [
            "Found: prompt tokens up to which keys, values and a state are cached. Keys and values found: what a model "
            "of attention alone would find.",
            *super().notes(rows),
        ]
