"""`ksana bench serving`: latency, throughput and goodput of a server or an engine under requests that keep arriving."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench.core import Bench, Case, option, spread
from ksana_jax.lab.bench.latency import make_llm
from ksana_jax.lab.bench.serving_load import LoadTarget, Sent, send_all
from ksana_jax.lab.bench.serving_targets import EngineTarget, HTTPTarget, TargetModel
from ksana_jax.lab.runs.dotted import dotlist
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, milliseconds, of_metric
from ksana_jax.serve.server.settings import read_api_keys
from ksana_jax.serve.workload import read_workload
from ksana_jax.serve.workload.base import WorkloadSettings
from ksana_jax.serve.workload.items import Workload
from ksana_jax.serve.workload.report import LatencyLimits, flat, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AT_ONCE = "all at once"
# A sender later than this for one request in a hundred does not offer the requested load.
MAX_LAG_S = 0.005
# Share of the requests that must meet the limits in the conclusion.
ENOUGH = 0.9
MODEL = "ksana-tiny"
REQUESTS, WARM_REQUESTS = 100, 4
# Columns of the table; files have all percentiles.
_PERCENTS = {"ttft": (50, 90, 99), "tpot": (50, 90, 99), "itl": (99,), "e2e": (50, 90, 99)}


@dataclasses.dataclass
class ServingBench(Bench):
    """Measures latency, throughput and goodput under open-loop load.

    Send times are fixed beforehand. With --url requests go to a running server, otherwise to an engine in this process.
    Prompts are new ones in every run, so that none is in a prefix cache, unless a seed is given."""

    REPEATS = 1
    WARM_TURN = False

    url: str | None = option(None, "server to measure, such as http://127.0.0.1:8000; without it, an engine of its own")
    model: str | None = option(None, "model directory or name; with --url, the name of one of the server's models")
    workload: dict[str, Any] | str = option(
        "{kind: synthetic, prompt: [16, 160], output: [8, 64]}", "workload or preset as in docs/use/workloads.md"
    )
    requests: int | None = option(None, "number of requests; the workload's, or else 100, if it is not given")
    rate: str | None = option(None, "requests per second, several separated by commas; inf sends all at once")
    burstiness: float | None = option(None, "shape of the gamma distribution of gaps: 1 is Poisson, less are bursts")
    max_concurrency: int | None = option(None, "most requests that are open at once; others wait with the sender")
    slo: str = option("", "limits that a request must meet to count as good, in seconds: ttft=2,tpot=0.1,e2e=30")
    seed: int | None = option(None, "seed of gaps, lengths and texts; a new one in each run if it is not given")
    timeout_s: float = option(600.0, "seconds after which a request fails")
    dtype: str = option("f32", "f32, bf16 or f16, of an engine of its own")
    engine: dict[str, Any] | None = option(None, "settings of an engine of its own, such as '{max_num_seqs: 32}'")
    api_key_file: str | None = option(None, "file whose first key is sent, as for ksana serve")
    vocab_size: int | None = option(None, "prompts have ids below it; the server's if it says so")

    def title(self) -> str:
        where = self.url or f"an engine of {self.model or MODEL}, {self.dtype}"
        return f"ServingBench {self._settings().label} on {where}"

    def cases(self) -> list[Case]:
        checks.require(
            checks.integer("requests", self.requests, optional=True),
            checks.number("burstiness", self.burstiness, above=0, optional=True),
            checks.integer("max_concurrency", self.max_concurrency, optional=True),
            checks.integer("seed", self.seed, 0, 2**62, optional=True),
            checks.number("timeout_s", self.timeout_s, above=0),
            checks.integer("vocab_size", self.vocab_size, 4, optional=True),
            error=ConfigError,
        )
        if self.url is not None and (self.engine is not None or not self.url.startswith(("http://", "https://"))):
            wrong = "must begin with http:// or https://" if self.engine is None else "does not go with --engine"
            raise ConfigError(f"url is {self.url!r:.80}, {wrong}")
        self.limits = LatencyLimits.read(self.slo)
        made = self._settings().make(64)
        if self.rate is None:
            return [Case("", {"rate": AT_ONCE if made.rate == np.inf else float(f"{made.rate:.4g}")})]
        return [Case("", {"rate": rate}) for rate in _rates(self.rate)]

    def _settings(self) -> WorkloadSettings:
        setting = self.workload
        if isinstance(setting, str):
            setting = dotlist([f"workload={setting}"])["workload"]
        more: dict[str, Any] = {}
        if self.requests is not None or not (isinstance(setting, Mapping) and "num_requests" in setting):
            more["num_requests"] = REQUESTS if self.requests is None else self.requests
        if self.burstiness is not None:
            more["cv"] = self.burstiness**-0.5
        return read_workload(setting, **more)

    # ------------------------------------------------------------------ measuring

    def start(self) -> None:
        self.base_seed = secrets.randbits(32) if self.seed is None else self.seed
        self.num_runs = 0
        self.runner = asyncio.Runner()
        self.http: HTTPTarget | None = None
        self.llm = None
        self.about = self.runner.run(self._open_server(self.url)) if self.url else self._open_engine()
        if (self.about.vocab_size or self.vocab_size) is None:
            raise ConfigError(f"{self.url} does not say how many token ids its model has: give --vocab-size")
        made = self._made(AT_ONCE)
        self._send(dataclasses.replace(made, items=made.items[:WARM_REQUESTS]))

    async def _open_server(self, url: str) -> TargetModel:
        _keep_off_accelerators()
        self.http = HTTPTarget(url, self.api_key_file and read_api_keys(Path(self.api_key_file))[0])
        self.target: LoadTarget = self.http
        return await self.http.open(self.model)

    def _open_engine(self) -> TargetModel:
        from ksana_jax.engine.async_llm import AsyncLLM

        llm = make_llm(self.model or MODEL, dtype=self.dtype, seed=self.base_seed, **(self.engine or {}))
        llm.warm_up()
        self.llm = AsyncLLM.around(llm)
        self.target = EngineTarget(self.llm, detokenize=llm.tokenizer is not None)
        return TargetModel(llm.name, llm.model_config.vocab_size, self.llm.max_model_len)

    def measure(self, case: Case) -> Measurement:
        workload = self._made(case.point["rate"])
        sent = self._send(workload)
        report = summarise(sent.times, self.limits)
        lag_p99 = float(np.percentile(sent.lags_s, 99))
        # Requests that come at once have no send times.
        late = self.url is not None and case.point["rate"] != AT_ONCE and lag_p99 > MAX_LAG_S
        return {
            **flat(report),
            "send_lag_p99_s": lag_p99,
            "send_lag_max_s": float(sent.lags_s.max()),
            "void": int(late),
            "seed": workload.seed,
            "report": report,
            "workload": workload.describe(),
            "requests": _rows(sent),
        }

    def _made(self, rate: float | str) -> Workload:
        """Returns the workload with new texts; at each rate, the same requests with scaled gaps."""
        self.num_runs += 1
        texts = (self.base_seed + (self.num_runs << 32)) % 2**63
        settings = dataclasses.replace(self._settings(), seed=self.base_seed, text_seed=texts)
        vocab_size = self.vocab_size or self.about.vocab_size
        assert vocab_size is not None
        made = settings.make(vocab_size)
        for item in made.items:
            total, most = item.num_prompt + item.num_output, self.about.max_model_len
            if most is not None and total > most:
                raise ConfigError(
                    f"request {item.index} has {item.num_prompt:,} + {item.num_output:,} tokens, max_model_len is "
                    f"{most:,}: set max_prompt and max_output in the workload"
                )
        if rate == AT_ONCE:
            items = [dataclasses.replace(item, arrival_s=item.arrival_s * 0) for item in made.items]
            return dataclasses.replace(made, items=items)
        return made if self.rate is None else made.scaled(float(rate))

    def _send(self, workload: Workload) -> Sent:
        limits = {"max_concurrency": self.max_concurrency, "timeout_s": self.timeout_s}
        return self.runner.run(send_all(workload, self.target, **limits))

    def close(self) -> None:
        if self.http is not None:
            self.runner.run(self.http.close())
        if self.llm is not None:
            self.runner.run(self.llm.aclose())
        self.runner.close()

    # ------------------------------------------------------------------ results

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        def has(key: str) -> bool:
            return any(row.mean(key) for row in rows)

        found = [
            Column("requests_per_s", "requests/s", lambda value: f"{value:,.2f}"),
            Column("output_tokens_per_s", "output tokens/s", lambda value: f"{value:,.0f}"),
        ]
        if has("output_tokens_per_s_spread"):
            found.append(spread("output_tokens_per_s"))
        if self._limits(rows):
            found.append(Column("goodput_share", "meet the limits", lambda value: f"{value:.1%}"))
            found.append(Column("goodput_requests_per_s", "good requests/s", lambda value: f"{value:,.2f}"))
        for name, percents in _PERCENTS.items():
            found += [Column(f"{name}_p{p}_s", f"{name.upper()} p{p}, ms", milliseconds()) for p in percents]
        found.append(Column("hit_rate", "cached", lambda value: f"{value:.1%}"))
        if has("num_failed"):
            found.append(Column("num_failed", "failed", lambda value: f"{value:,.0f}"))
        found.append(Column("send_lag_p99_s", "sent late p99, ms", milliseconds()))
        if has("void"):
            found.append(Column("void", "void", lambda value: "yes" if value else ""))
        return found

    def _limits(self, rows: Sequence[ResultRow]) -> Mapping[str, float]:
        """Returns the limits of the measured rows."""
        found = [m["report"].get("goodput") for m in of_metric(rows, "repetition")]
        return found[0]["limits"] if found and found[0] else {}

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Names the largest rate at which enough requests meet the limits."""
        limits = self._limits(rows)
        rates = [row for row in rows if isinstance(row.point["rate"], (int, float)) and not row.mean("void")]
        if not limits or not rates:
            return ""
        said = ", ".join(f"{name.removesuffix('_s').upper()} {value:g} s" for name, value in limits.items())
        good = [row for row in rates if (row.mean("goodput_share") or 0) >= ENOUGH]
        if not good:
            return f"At none of these rates do {ENOUGH:.0%} of the requests meet {said}."
        best = max(row.point["rate"] for row in good)
        return f"{ENOUGH:.0%} of the requests meet {said} at up to {best:g} requests/s of those measured."

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        said = [
            "TTFT: from the time at which a request is due to its first token; TPOT: mean time per later token; ITL: "
            "between pieces of an answer; E2E: to the last token. Over requests that have finished."
        ]
        for row in rows:
            for m in of_metric([row], "repetition"):
                failures = [f"{failure}." for failure in m["report"]["failures"]]
                if m["void"]:
                    lag, most = m["send_lag_p99_s"] * 1000, MAX_LAG_S * 1000
                    failures.append(
                        f"void: the sender was {lag:,.1f} ms late at p99, more than {most:g} ms; run it where it has a "
                        "processor of its own."
                    )
                said += [f"{row.name}: {failure}" for failure in failures]
        loads = [m["workload"] for m in of_metric(rows, "repetition")]
        said += [f"{note}." for note in dict.fromkeys(note for load in loads for note in load["notes"])]
        if loads:
            said.append(f"Gaps and lengths from seed {loads[0]['seed']}; texts differ in every run.")
        if self.url is not None:
            said.append("The server counts as another program here if it runs on this machine.")
        return [*said, *super().notes(rows)]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws TTFT above and TPOT below over the rate, a line per percentile."""
        from ksana_jax.lab.runs.figures import legend
        from ksana_jax.lab.runs.tasks.row_figure import draw_means

        measured = [row for row in rows if row.values]
        numeric = all(row.point["rate"] != AT_ONCE for row in measured)
        above, below = figure.subplots(2, 1, sharex=True)
        for axes, name in ((above, "ttft"), (below, "tpot")):
            for index, percent in enumerate((50, 90, 99)):
                key, label = f"{name}_p{percent}_s", f"p{percent}"
                x = [row.point["rate"] if numeric else str(row.point["rate"]) for row in measured]
                draw_means(axes, x, [(row, key) for row in measured], index, label, 1e-3)
            axes.set_ylabel(f"{name.upper()} (ms)")
        below.set_xlabel("requests/s")
        legend(figure, above, ncols=3)


def _rates(text: str) -> list[float | str]:
    found: list[float | str] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = np.nan
        if not value > 0:
            raise ConfigError(f"rate is {text!r}, must be positive numbers separated by commas, or inf")
        found.append(AT_ONCE if value == np.inf else value)
    return found


def _rows(sent: Sent) -> dict[str, list[Any]]:
    """Returns the times of each request as lists, in seconds since the first was due; None for never."""
    begin = min(one.sent_s for one in sent.times)
    names = ("sent_s", "first_token_s", "finished_s")
    times = {n: [None if np.isnan(t := getattr(one, n)) else round(t - begin, 6) for one in sent.times] for n in names}
    counts = {n: [getattr(one, n) for one in sent.times] for n in ("num_prompt", "num_output", "num_cached_tokens")}
    return {**times, **counts, "error": [one.error for one in sent.times]}


def _keep_off_accelerators() -> None:
    """Keeps this process, which only sends requests, from taking device memory that the server needs."""
    import jax

    jax.config.update("jax_platforms", "cpu")
