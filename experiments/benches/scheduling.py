"""Request-level against iteration-level batching, as throughput against latency.

Source: ORCA (OSDI 2022), section 2 and figure 10, where request-level batching is FasterTransformer's: a batch is taken
when nothing runs, and its answers return when the longest of them ends.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import MODEL_HELP
from ksana_jax.lab.bench.core import Bench, Case, option, spread
from ksana_jax.lab.bench.latency import make_llm
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, milliseconds
from ksana_jax.lab.simulator.request_level import packing

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from ksana_jax.engine.engine import Engine

ITERATION, REQUEST, PADDED = METHODS = ("iteration-level", "request-level", "request-level, padded")
ALONE, AT_ONCE = "one at a time", "all at once"
# Limits of latency for the conclusion, as multiples of a single request's.
LIMITS = (1.25, 1.5, 2.0, 3.0, 5.0)


class SimulatedRequest(NamedTuple):
    """A request: its prompt, number of output tokens, and arrival in seconds."""

    prompt: np.ndarray
    num_output: int
    arrival_s: float


@dataclasses.dataclass
class Scheduling(Bench):
    """Measures throughput against latency of request-level and iteration-level batching, on one engine.

    Requests arrive at random at several rates; idle times of the engine are skipped, not waited for. Latency
    is ORCA's: the time from arrival to the last token, divided by the number of output tokens."""

    REPEATS = 1
    WARM_TURN = False

    model: str = option("bench-s", MODEL_HELP)
    dtype: str = option("f32", "f32, bf16 or f16")
    rows: int = option(16, "most requests that run at once, and of a batch")
    requests: int = option(48, "number of requests")
    prompt: tuple[int, ...] = option((32, 256), "fewest and most tokens of a prompt, uniformly drawn")
    output: tuple[int, ...] = option((1, 128), "fewest and most tokens of an output, uniformly drawn")
    loads: tuple[float, ...] = option(
        (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0),
        "rates of arrival, relative to the rate at which the engine serves all requests at once",
    )
    seed: int = option(0, "seed of weights, prompts, lengths and arrivals")

    def title(self) -> str:
        (least, most), (fewest, longest) = self.prompt, self.output
        lengths = f"prompts of {least} to {most} tokens, outputs of {fewest} to {longest}"
        return f"Batching of {self.model}, {self.dtype}: {self.requests} requests, {self.rows} rows, {lengths}"

    def cases(self) -> list[Case]:
        for name in ("prompt", "output"):
            if len(bounds := getattr(self, name)) != 2 or not 1 <= bounds[0] <= bounds[1]:
                raise ConfigError(f"{name} is {bounds}, must be two numbers from 1, the fewest tokens and the most")
        checks.require(
            *(checks.integer(name, getattr(self, name), 1) for name in ("rows", "requests")),
            *(checks.number("loads", load, above=0) for load in self.loads),
            error=ConfigError,
        )
        alone = Case(ITERATION, {"load": ALONE})
        return [alone, *(Case(method, {"load": load}) for load in (*self.loads, AT_ONCE) for method in METHODS)]

    def start(self) -> None:
        longest = self.prompt[1] + self.output[1]
        self.llm = make_llm(self.model, dtype=self.dtype, seed=self.seed, max_num_seqs=self.rows, max_model_len=longest)
        self.llm.warm_up()
        self.measure(Case(ITERATION, {"load": AT_ONCE}))
        # A load of 1: the rate of service when requests are always waiting.
        self.capacity = self.measure(Case(ITERATION, {"load": AT_ONCE}))["requests_per_s"]

    def measure(self, case: Case) -> Measurement:
        load = case.point["load"]
        jobs, alone = self.jobs(math.inf if isinstance(load, str) else load * self.capacity), load == ALONE
        method, rows = (REQUEST, 1) if alone else (case.label, self.rows)
        ended = serve(self.llm.engine, jobs, method, rows)
        latency = sorted((end - job.arrival_s) / job.num_output for job, end in zip(jobs, ended, strict=True))
        if alone:  # without waiting for the jobs before it
            begun = [0.0, *ended[:-1]]
            latency = sorted((e - b) / j.num_output for j, b, e in zip(jobs, begun, ended, strict=True))
        seconds = max(ended) - jobs[0].arrival_s
        found = {
            "latency_s": latency[len(latency) // 2],
            "latency_p90_s": latency[len(latency) * 9 // 10],
            "requests_per_s": len(jobs) / seconds,
            "tokens_per_s": sum(job.num_output for job in jobs) / seconds,
        }
        if load == AT_ONCE:
            found["packing"] = packing([job.num_output for job in jobs], self.rows)
        return found

    def jobs(self, rate: float) -> list[SimulatedRequest]:
        """Returns the requests, with exponential gaps of mean 1 / rate; rates differ in the gaps only."""
        import numpy as np

        rng = np.random.default_rng(self.seed)
        prompts = rng.integers(self.prompt[0], self.prompt[1] + 1, self.requests)
        outputs = rng.integers(self.output[0], self.output[1] + 1, self.requests)
        arrivals = np.cumsum(rng.exponential(1.0, self.requests)) / rate
        vocab_size = self.llm.model_config.vocab_size
        drawn = zip(prompts, outputs, arrivals, strict=True)
        return [SimulatedRequest(rng.integers(3, vocab_size, n, np.int32), int(m), float(a)) for n, m, a in drawn]

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("requests_per_s", "requests/s", lambda value: f"{value:,.2f}"),
            Column("tokens_per_s", "output tokens/s", lambda value: f"{value:,.0f}"),
            spread("tokens_per_s"),
            Column("latency_s", "latency per token p50, ms", milliseconds()),
            Column("latency_p90_s", "latency per token p90, ms", milliseconds()),
        ]

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Compares the largest throughputs at several limits of latency."""
        curves, floor = _curves(rows)
        if floor is None or set(curves) != set(METHODS):
            return ""
        parts = []
        for limit in LIMITS:
            ours, ragged, padded = (best_rate(curves[method], floor, limit * floor) for method in METHODS)
            if ours and ragged and padded:
                parts.append(f"{limit:g} x: {ours / ragged:.1f} ({ours / padded:.1f} padded)")
        if not parts:
            return ""
        return (
            "Requests/s of iteration-level relative to request-level batching, where the median latency may be that of "
            f"a request alone ({floor * 1000:,.1f} ms per token) times a limit: {'; '.join(parts)}."
        )

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        said = [
            "Load: rate of arrival, as a share of the rate at which iteration-level batching serves all requests that "
            "are there at once. Latency: from arrival to the answer, per output token. Request-level: a batch is taken "
            "when nothing runs and answers return together; padded: all of a batch have its longest prompt and output."
        ]
        last = {row.label: row for row in rows if row.point["load"] == AT_ONCE}
        bound = last[ITERATION].mean("packing") if ITERATION in last else None
        rates = [last[method].mean("requests_per_s") if method in last else None for method in METHODS]
        if bound and rates[0] and rates[1] and rates[2]:
            said.append(
                f"Packing bound: of the places in batches padded to their longest output, {bound:.0%} compute a token "
                f"that is asked for, so at full load iteration-level batching gains at most {1 / bound:.2f} times if a "
                f"step's time does not depend on its rows; measured: {rates[0] / rates[1]:.2f}, and "
                f"{rates[0] / rates[2]:.2f} padded, where prompts are longer too."
            )
        return [*said, *super().notes(rows)]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws the median latency over the throughput, a line per method, and the latency of a request alone."""
        from ksana_jax.lab.runs.figures import legend, line_style

        axes = figure.subplots()
        curves, floor = _curves(rows)
        for index, (method, points) in enumerate(curves.items()):
            rates, latencies = [rate for _, rate in points], [latency * 1000 for latency, _ in points]
            axes.plot(rates, latencies, marker="o", label=method, **line_style(index))
        if floor is not None:
            axes.axhline(floor * 1000, color="grey", linewidth=0.6)
            axes.axhline(2 * floor * 1000, color="grey", linewidth=0.6, linestyle="--", label="2 x a request alone")
        axes.set_yscale("log")
        axes.set_xlabel("requests/s")
        axes.set_ylabel("median latency per output token (ms)")
        legend(figure, axes)


def serve(
    engine: Engine,
    jobs: Sequence[SimulatedRequest],
    method: str,
    rows: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Serves jobs that arrive in order; returns the time of each answer, in seconds on the arrivals' clock.

    That time is the clock's, but skips to the next arrival while nothing runs.

    Args:
      method: one of METHODS. Iteration-level batching passes arrivals on at once; other methods keep them until nothing
        runs, take `rows` of them, and answer them together.
    """
    from ksana_jax.core.request import SamplingParams

    arriving, waiting = collections.deque(range(len(jobs))), collections.deque()
    ended = [math.nan] * len(jobs)
    running: dict[str, int] = {}
    batch: list[int] = []
    began = clock()
    now = 0.0
    while arriving or waiting or running:
        now = clock() - began
        if not waiting and not running and jobs[arriving[0]].arrival_s > now:
            began -= jobs[arriving[0]].arrival_s - now
            now = jobs[arriving[0]].arrival_s
        while arriving and jobs[arriving[0]].arrival_s <= now:
            waiting.append(arriving.popleft())
        if method == ITERATION or not running:
            most = len(waiting) if method == ITERATION else min(rows, len(waiting))
            batch = [waiting.popleft() for _ in range(most)]
            longest = max((jobs[i].num_output for i in batch), default=0)
            width = max((len(jobs[i].prompt) for i in batch), default=0)
            for i in batch:
                prompt, count = jobs[i].prompt, jobs[i].num_output
                if method == PADDED:
                    prompt, count = _padded(prompt, width), longest
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
                running[engine.add_request(prompt, params).request_id] = i
        done = [running.pop(request.request_id) for request in engine.step() if request.finished]
        now = clock() - began
        for i in done:
            ended[i] = now
        if method != ITERATION and not running:
            for i in batch:
                ended[i] = now
    return ended


def _padded(prompt: np.ndarray, width: int) -> np.ndarray:
    """Returns a prompt that repeats until it has `width` tokens."""
    import numpy as np

    return np.resize(prompt, width)


def best_rate(curve: Sequence[tuple[float, float]], floor: float, limit: float) -> float:
    """Returns the largest rate whose latency is at most a limit, on lines between the measured points.

    Args:
      curve: (latency, rate) by rising load. floor: latency at a rate of 0, from which the first line starts.
    """
    best, before = 0.0, (floor, 0.0)
    for latency, rate in curve:
        if latency <= limit:
            best = max(best, rate)
        elif before[0] <= limit:
            share = (limit - before[0]) / (latency - before[0])
            best = max(best, before[1] + share * (rate - before[1]))
        before = (latency, rate)
    return best


def _curves(rows: Sequence[ResultRow]) -> tuple[dict[str, list[tuple[float, float]]], float | None]:
    """Returns (median latency, requests/s) of each method by rising load, and the latency of a request alone."""
    curves: dict[str, list[tuple[float, float]]] = {}
    floor = None
    for row in rows:
        latency, rate = row.mean("latency_s"), row.mean("requests_per_s")
        if latency is None or rate is None:
            continue
        if row.point["load"] == ALONE:
            floor = latency
        else:
            curves.setdefault(row.label, []).append((latency, rate))
    return curves, floor
