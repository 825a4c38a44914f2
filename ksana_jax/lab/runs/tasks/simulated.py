"""Shared by simulating tasks: settings, a workload, servers and a router. No weights are loaded, no jax."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from ksana_jax.core import checks
from ksana_jax.core.config import ConfigError, EngineConfig, ModelConfig
from ksana_jax.core.patterns import per_layer
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.lab.runs.identity import canonical
from ksana_jax.lab.runs.tasks.base import INPUT_FILES, BaseTask, TrialContext, float_field, int_field
from ksana_jax.lab.runs.tasks.results import (
    Column,
    Measurement,
    ResultRow,
    milliseconds,
    number,
    of_metric,
    percent,
)
from ksana_jax.lab.runs.text_files import content_digest
from ksana_jax.lab.simulator import fleet, request_level
from ksana_jax.lab.simulator.chains import Chains
from ksana_jax.lab.simulator.cost import Cost, read_cost
from ksana_jax.lab.simulator.fitted import FittedCost
from ksana_jax.lab.simulator.one_engine import SimEngine
from ksana_jax.lab.simulator.sim_models import SimModels
from ksana_jax.lab.simulator.slo import percentile
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.loading.config_json import load_config
from ksana_jax.methods.presets import read_pattern
from ksana_jax.scheduler.step.ladders import make_buckets
from ksana_jax.serve.router.policies import read_policy
from ksana_jax.serve.router.router import Router
from ksana_jax.serve.router.settings import RouterSettings
from ksana_jax.serve.workload import read_workload
from ksana_jax.serve.workload.items import Workload
from ksana_jax.serve.workload.report import RequestTimes, flat, summarise

# Columns that simulations of one server and of several have.
LATENCIES = (
    Column("ttft_p50_s", "TTFT p50, ms", milliseconds(), "min"),
    Column("ttft_p90_s", "TTFT p90, ms", milliseconds()),
    Column("ttft_p99_s", "TTFT p99, ms", milliseconds()),
    Column("tpot_p50_s", "TPOT p50, ms", milliseconds()),
    Column("e2e_p50_s", "E2E p50, ms", milliseconds()),
    Column("hit_rate", "hit rate, %", percent()),
)
LOADS = (
    Column("utilisation", "busy, %", percent()),
    Column("preemptions", "preemptions", number(0)),
)
ONE_ENGINE, BY_REQUEST = SERVERS = ("engine", "request_level")


@dataclasses.dataclass
class SimulatedSettings:
    """Fields of `settings` in experiments that simulate.

    workload: requests, see `serve.workload`: {"kind": "sessions", ...} or {"preset": "orca", ...}. The trial's seed
      replaces its own. The path of a trace is relative to the working directory.
    rate: requests per second, to which the workload's gaps are scaled; null leaves them.
    pool_bytes: size of a server's pool instead of engine.num_blocks, which then are as many as fit with the engine's
      kv_cache_dtype.
    cost: cost model of steps: {"level": "affine", "step_s": 0.01, "token_s": 0.0001}, the default for null, or another
      model (`simulator.cost`), or the file of a fit. One of level roofline takes the engine's kv_cache_dtype, unless it
      has its own. Moves between tiers take no time unless it has "move": {"saved": {"bytes_per_s": 4e10}, "read":
      {"fixed_s": 0.0001, "bytes_per_s": 6e9}}; the ways are saved, copied, loaded, and written and read of a disk tier;
      its disk_cache_dir must be set, to any name.
    server: "engine" runs the real engine, scheduler and memory; "request_level" batches by request, as
      FasterTransformer does.
    servers: number of servers.
    policy: how the router chooses among them: a name or a mapping, see `ksana_jax.serve.router`.
    router: fields of `RouterSettings`. Rate of prefill and size of the pool default to the servers'.
    network_s: seconds from the router to a server, and back.
    noise: multiply the time of each step by a ratio drawn from the measured ones of its shape, which needs a fitted
      cost. Each server draws its own, from the trial's seed.
    switch_s: each of the workload's clients asks a model of its own, of which a server has one awake; seconds of a
      change (`simulator.sim_models`). null: all ask one model.
    platform: whose buckets steps are padded to: "cpu", "gpu" or "tpu".
    warm_up: share of the requests, the first to arrive, that is left out of the results.
    """

    workload: Any = "orca"
    rate: float | None = float_field(None, above=0)
    pool_bytes: int | None = int_field(None)
    cost: Any = dataclasses.field(default=None, metadata=INPUT_FILES)
    server: Literal["engine", "request_level"] = ONE_ENGINE
    servers: int = int_field(1, 1, 100_000)
    policy: Any = "min_ttft"
    router: dict[str, Any] = dataclasses.field(default_factory=dict)
    network_s: float = float_field(0.0, low=0)
    noise: bool = False
    switch_s: float | None = float_field(None, low=0)
    platform: str = "cpu"
    warm_up: float = float_field(0.1, low=0, below=1)


class Simulation:
    """The workload and the servers of one trial.

    Raises:
      ConfigError: a setting is wrong; nothing is simulated yet.
    """

    def __init__(self, config: Mapping[str, Any], settings: SimulatedSettings, seed: int):
        self._settings, self._seed = settings, seed
        self.model = _model(config)
        self.engine = _with_pool(self.model, EngineConfig(**config["engine"]), settings.pool_bytes)
        workload = read_workload(settings.workload, seed=seed).make(self.model.vocab_size)
        self.workload = workload if settings.rate is None else workload.scaled(settings.rate)
        self._chains = Chains(self.engine.block_size)

    def requests(self, rate: float) -> list[RequestTimes]:
        """Serves the workload at a rate in requests/s; returns the clients' times."""
        served = self._serve(self.workload.scaled(rate))
        return served.requests if isinstance(served, fleet.FleetRun) else served

    def measure(self) -> Measurement:
        """Serves the workload; returns the figures of requests after the warm-up, and of servers."""
        served = self._serve(self.workload)
        begin = math.ceil(len(self.workload.items) * self._settings.warm_up)
        of_servers, failures = {}, []
        if isinstance(served, fleet.FleetRun):
            of_servers, failures = _of_servers(served), fleet.growing(served.trips[begin:])
            served = served.requests
        requests = sorted(served, key=lambda request: (request.sent_s, request.index))[begin:]
        latency_s = percentile(requests, "latency_per_token", 50)
        report: dict[str, Any] = summarise(requests) | {"latency_per_token_p50_s": latency_s}
        return {
            "metric": "run",
            "sample": self.sample,
            "failures": report["failures"] + failures,
            **{name: value for name, value in flat(report).items() if math.isfinite(value)},
            **of_servers,
        }

    @property
    def sample(self) -> str:
        """Equal for equal requests."""
        return f"{self.workload.name}, seed {self.workload.seed}"

    def _serve(self, workload: Workload) -> fleet.FleetRun | list[RequestTimes]:
        settings = self._settings
        if settings.server == BY_REQUEST:
            return request_level.serve(workload.items, self._cost(), self.engine.max_num_seqs)
        router = Router(range(settings.servers), settings.policy, self._router_settings(), workload.seed)
        return fleet.serve(workload.items, self._make_server(), router, self._chains, network_s=settings.network_s)

    def _make_server(self) -> fleet.MakeServer:
        settings = self._settings
        numbers = itertools.count()

        def make(events: Any, **calls: Any) -> SimEngine:
            seed = (self._seed, next(numbers)) if settings.noise else None
            # One cost model each: some have a state.
            cost = self._cost()
            given = {"seed": seed, "platform": settings.platform, **calls}
            if settings.switch_s is None:
                return SimEngine(self.model, self.engine, events, cost, **given)
            return SimModels(self.model, self.engine, events, cost, switch_s=settings.switch_s, **given)

        return make

    def _cost(self) -> Cost:
        return cost_of(self._settings, self.engine.kv_cache_dtype)

    def _router_settings(self) -> RouterSettings:
        """Returns the router's assumptions: the servers' rate of prefill and pool, unless the settings differ."""
        engine = self.engine
        assert engine.num_blocks is not None
        given = {
            "block_size": engine.block_size,
            "prefill_tokens_per_s": engine.max_num_batched_tokens / self._prefill_s(),
            "pool_tokens": engine.num_blocks * engine.block_size,
        }
        return read_router(given | self._settings.router)

    def _prefill_s(self) -> float:
        """Returns the seconds of a step that computes the first max_num_batched_tokens of one prompt."""
        engine, cost = self.engine, self._cost()
        filled = engine.for_model(self.model, per_layer(self.model.pattern, self.model.num_layers))
        buckets, count = make_buckets(filled, self._settings.platform, model=self.model), engine.max_num_batched_tokens
        shape = buckets.shape(0, [count], min(-(-count // engine.block_size), buckets.widths[-1]))
        size = StepSize(shape, buckets.num_sampled(1), count, count, count * (count + 1) // 2, 1)
        device_s, host_s = cost.seconds(size), cost.host_seconds(size)
        return max(device_s, host_s) if engine.async_scheduling else device_s + host_s


def _of_servers(run: fleet.FleetRun) -> dict[str, float]:
    return {
        "imbalance": run.imbalance,
        "utilisation": sum(run.busy_s) / len(run.busy_s) / run.seconds,
        "preemptions": sum(trip.served.num_preemptions for trip in run.trips if trip.served),
    }


class SimulatedTask(BaseTask):
    """Base of tasks that simulate. Their trials need no engine with a model."""

    def check(self, config: Mapping[str, Any]) -> None:
        settings: SimulatedSettings = self.Settings(**config["settings"])
        checks.require(
            checks.one_of("settings.server", settings.server, SERVERS),
            checks.boolean("settings.noise", settings.noise),
            checks.one_of("settings.platform", settings.platform, ("cpu", "gpu", "tpu")),
            error=ConfigError,
        )
        _with_pool(_model(config), EngineConfig(**config["engine"]), settings.pool_bytes)
        if settings.server == BY_REQUEST and settings.servers > 1:
            raise ConfigError("settings.servers: batching by request is simulated for one server")
        read_workload(settings.workload)
        if settings.switch_s is not None and (settings.server != ONE_ENGINE or config["engine"]["enable_lora"]):
            raise ConfigError(
                f"settings.switch_s is set, server is {settings.server!r} and enable_lora "
                f"{config['engine']['enable_lora']}: clients that ask models need server 'engine' and no adapters"
            )
        cost = cost_of(settings, config["engine"]["kv_cache_dtype"])
        if settings.noise and not (settings.server == ONE_ENGINE and isinstance(cost, FittedCost)):
            raise ConfigError(
                f"settings.noise is set, server is {settings.server!r} and cost {type(cost).__name__}: noise is drawn "
                "from the measured times of steps, it needs server 'engine' and a file of `ksana simulate fit`"
            )
        read_policy(settings.policy)
        read_router(settings.router)
        if not _model(config).eos_ids:
            raise ConfigError(f"model {config['model']} has no end-of-sequence id, with which simulated answers end")

    def inputs(self, settings: SimulatedSettings) -> dict[str, str]:
        # A field that may name a file is no part of a trial's id, so its content is included here in either form.
        if isinstance(settings.cost, str):
            found = {"cost": content_digest(settings.cost, "settings.cost")}
        else:
            found = {"cost": canonical(settings.cost)}
        if isinstance(settings.workload, Mapping) and isinstance(path := settings.workload.get("path"), str):
            found["workload"] = content_digest(path, "settings.workload.path")
        return found

    def run(self, trial: TrialContext) -> Iterator[Measurement]:
        yield Simulation(trial.config, self.Settings(**trial.config["settings"]), trial.seed).measure()

    def summarise(self, measurements: Sequence[Measurement]) -> dict[str, float]:
        [run] = [m for m in measurements if m["metric"] == "run"]
        return {k: float(v) for k, v in run.items() if isinstance(v, (int, float))}

    def sample(self, key: str, measurements: Sequence[Measurement]) -> Hashable | None:
        """Rows with equal workloads and seeds serve the same requests."""
        return measurements[0]["sample"] if measurements else None

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        """Names the failures of runs: their averages mean little."""
        found = [
            f"{row.name}, {m['sample']}: {'; '.join(m['failures'])}."
            for row in rows
            for m in of_metric([row], "run")
            if m["failures"]
        ]
        return found[:10] + [f"{len(found) - 10} more runs have failures."] * (len(found) > 10)


def cost_of(settings: SimulatedSettings, kv_cache_dtype: Any) -> Cost:
    """Returns a new model of the costs of steps of an engine."""
    given = settings.cost
    if given is None:
        given = {"level": "affine", "step_s": 0.01, "token_s": 0.0001}
    elif isinstance(given, Mapping) and given.get("level") == "roofline":
        given = {"kv_cache_dtype": kv_cache_dtype, **given}
    return read_cost(given)


def _with_pool(model: ModelConfig, engine: EngineConfig, pool_bytes: int | None) -> EngineConfig:
    """Returns an engine's settings with a pool of pool_bytes, unless that is None.

    Raises:
      ConfigError: the size of the pool is not given, or given twice, or no block fits.
    """
    if (pool_bytes is None) == (engine.num_blocks is None):
        raise ConfigError(
            f"engine.num_blocks is {engine.num_blocks} and settings.pool_bytes {pool_bytes}: a simulated engine needs "
            "one of them"
        )
    if pool_bytes is None:
        return engine
    block_bytes = make_layout(model, per_layer(model.pattern, model.num_layers), engine).block_bytes
    if pool_bytes < block_bytes:
        raise ConfigError(f"settings.pool_bytes is {pool_bytes:,}, a block has {block_bytes:,} bytes")
    return dataclasses.replace(engine, num_blocks=pool_bytes // block_bytes)


def read_router(fields: Mapping[str, Any]) -> RouterSettings:
    """Returns the settings of a router.

    Raises:
      ConfigError: a field is unknown or out of range.
    """
    known = [field.name for field in dataclasses.fields(RouterSettings)]
    if unknown := sorted(fields.keys() - set(known)):
        raise ConfigError(f"settings.router has {unknown[0]!r}, fields are {', '.join(known)}")
    return RouterSettings(**fields)


def _model(config: Mapping[str, Any]) -> ModelConfig:
    """Returns the model's configuration, with the trial's attention pattern."""
    model = load_config(config["model"])
    if config["layer_patterns"]:
        return dataclasses.replace(model, pattern=tuple(map(read_pattern, config["layer_patterns"])))
    return model if config["pattern"] is None else dataclasses.replace(model, pattern=read_pattern(config["pattern"]))
