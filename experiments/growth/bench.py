"""Growth of time and memory with rows, contexts, models, cached blocks, adapters and waiting requests.

Each case runs in a separate process. Host costs are CPU seconds of the scheduler's loop with a device that takes no
time; the others are wall seconds of decode steps of models with random weights.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments.benches import host_engine
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.request import SamplingParams
from ksana_jax.lab.bench.core import Bench, Case, option, spread
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.figures import legend, line_style, plain_numbers
from ksana_jax.lab.runs.machine_load import Compilations
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow, Scaled, milliseconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, WARM_UP, CONTEXT, ROWS = 48, 8, 256, 64
CHUNK = 1024  # tokens that a step computes at most
CACHED_PROMPT = 16_384  # tokens of the requests that fill the prefix cache
RANK = 8
# Shorter steps are not told apart by the clock.
_SHORTEST_S = 1e-6


class Found(NamedTuple):
    """Seconds of a step, what the simulator's roofline expects, None where it has no model of it, and programs compiled
    while it was timed."""

    step_s: float
    predicted_s: float | None = None
    compilations: int = 0


def rows_on_host(rows: int) -> Found:
    steps = rows * CONTEXT // host_engine.PREFILL_TOKENS + 2 * STEPS  # until the last row has joined, and then
    return _host_steps(host_engine.decoding_engine(rows, CONTEXT, steps, prefix_cache=True), rows)


def waiting_on_host(waiting: int) -> Found:
    engine = host_engine.decoding_engine(ROWS, CONTEXT, 2 * STEPS)
    prompt = np.zeros(CONTEXT, np.int32)
    for _ in range(waiting):
        engine.add_request(prompt, SamplingParams(max_tokens=2, detokenize=False))
    return _host_steps(engine, ROWS)


def cached_on_host(blocks: int) -> Found:
    """Times what admits a request of which all but the last token is cached, next to `blocks` cached blocks."""
    size = host_engine.BLOCK_SIZE
    engine = host_engine.idle_engine(1, blocks * size + CACHED_PROMPT, prefix_cache=True)
    rng, left, prompt = np.random.default_rng(0), blocks * size, np.zeros(0, np.int32)
    while left > 0:
        prompt = rng.integers(0, host_engine.VOCAB_SIZE, min(left, CACHED_PROMPT), np.int32)
        _run(engine, prompt)
        left -= len(prompt)
    engine.scheduler.schedule = schedule = host_engine.Stopwatch(engine.scheduler.schedule)
    seconds = []
    for _ in range(STEPS):
        schedule.read()
        _run(engine, prompt[:CONTEXT])
        seconds.append(schedule.read()[0])
    assert engine.scheduler.memory.counters.hit_tokens >= (STEPS - 1) * (CONTEXT - size)
    return Found(float(np.median(seconds[WARM_UP:])))


def _run(engine: Any, prompt: np.ndarray) -> None:
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1, detokenize=False))
    while engine.has_work:
        engine.step()


def _host_steps(engine: Any, rows: int) -> Found:
    executing = host_engine.Stopwatch(engine.executor.submit)
    engine.executor.submit = executing
    seconds = []
    for _ in range(WARM_UP + STEPS):
        executing.read()
        began = time.thread_time()
        engine.step()
        seconds.append(time.thread_time() - began - executing.read()[0])
        assert engine.records[-1].num_decodes == rows
    return Found(float(np.median(seconds[WARM_UP:])))


# ------------------------------------------------------------------- models


def rows_decoded(rows: int) -> Found:
    return _decode(_model(), rows, CONTEXT)


def context_decoded(tokens: int) -> Found:
    return _decode(_model(), 1, tokens)


def weights_decoded(width: int) -> Found:
    return _decode(_model(width), 1, CONTEXT)


def adapters_decoded(count: int) -> Found:
    from experiments.training.adapter_export import export_adapter, random_adapter
    from ksana_jax import LoRARequest
    from ksana_jax.loading.config_json import load_config

    folder, model = Path(tempfile.mkdtemp()), _model()
    requests = []
    for index in range(count):
        pairs = random_adapter(load_config(model), RANK, index)
        export_adapter(folder / str(index), pairs, RANK, RANK)
        requests.append(LoRARequest(f"adapter {index}", 1 + index, str(folder / str(index))))
    return _decode(model, ROWS, CONTEXT, requests)


def _model(width: int = 512) -> str:
    """Writes the configuration of a model of 8 layers, about 8 * 12 * width^2 parameters; returns its folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 8 * width // 3 // 32 * 32,
        "num_hidden_layers": 8,
        "num_attention_heads": width // 64,
        "num_key_value_heads": max(width // 128, 1),
        "max_position_embeddings": 2**16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 4096,
        "eos_token_id": 2,
    }
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _decode(model: str, rows: int, context: int, adapters: Sequence[Any] = ()) -> Found:
    from ksana_jax.lab.bench.latency import decode_seconds, make_llm

    of_adapters = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": RANK} if adapters else {}
    # The first rows decode until the last ones have joined.
    num_output = WARM_UP + STEPS + rows * context // CHUNK
    length = context + num_output
    settings = {"dtype": "bf16", "max_num_seqs": rows, "max_model_len": length, "max_num_batched_tokens": CHUNK}
    llm = make_llm(model, **settings, num_blocks=rows * -(-length // 16), enable_prefix_caching=True, **of_adapters)
    rng, params = np.random.default_rng(0), forced(num_output, temperature=0)
    prompts = rng.integers(3, llm.model_config.vocab_size, (rows, context))
    lora = [adapters[row % len(adapters)] for row in range(rows)] if adapters else None
    compilations = Compilations()
    for _ in range(3):  # the first time computes the prompts, the second finds them cached; both compile
        compilations.read()
        llm.clear_records()
        for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, lora_request=lora):
            output.check()
    seconds, compiled = decode_seconds(llm.records, rows), compilations.read()
    assert seconds is not None, "no two decode steps in succession"
    return Found(seconds, _predicted(llm, rows, context + num_output // 2), compiled)


def _predicted(llm: Any, rows: int, context: int) -> float:
    """Returns the seconds of a decode step on the simulator's roofline at this machine's measured rates."""
    from ksana_jax.lab.bench.bounds import measure_rates
    from ksana_jax.lab.simulator.roofline import RooflineCost
    from ksana_jax.lab.simulator.step_size import StepSize
    from ksana_jax.models.flops import StepFlops
    from ksana_jax.runner.planner.terms import weights_bytes
    from ksana_jax.scheduler.step.types import StepShape

    rates, config = measure_rates("bf16"), llm.model_config
    cost = RooflineCost(
        flops=StepFlops.of(config),
        weight_bytes=float(weights_bytes(config, "bf16", "host", None)),
        kv_token_bytes=llm.kv_bytes_per_token(context),
        flops_per_s=rates.flop_per_s,
        bytes_per_s=rates.bytes_per_s,
    )
    return cost.seconds(StepSize(StepShape((), 0, 0), rows, rows, 0, rows * context, rows))


# -------------------------------------------------------------------- bench


class Series(NamedTuple):
    """A cost over a size. work: exponent with which the work itself grows in the limit."""

    sizes: tuple[int, ...]
    work: int
    measure: Callable[[int], Found]


SERIES = {
    "host step, rows": Series((1, 4, 16, 64, 256, 1024, 4096), 1, rows_on_host),
    "host step of 64 rows, waiting requests": Series((1, 16, 256, 4096, 65_536), 0, waiting_on_host),
    "admission, cached blocks": Series((1024, 8192, 65_536, 262_144, 1_048_576), 0, cached_on_host),
    "decode step, rows": Series((1, 4, 16, 64, 256), 1, rows_decoded),
    "decode step, context": Series((256, 1024, 4096, 16_384, 32_768), 1, context_decoded),
    "decode step, width": Series((128, 256, 512, 1024, 2048, 3072), 2, weights_decoded),
    "decode step of 64 rows, adapters": Series((1, 4, 16, 64), 0, adapters_decoded),
}


def in_own_process(label: str, size: int) -> Measurement:
    """Measures one case in a fresh process: its time, and the memory that it takes beyond the imports."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return pool.submit(_measured, label, size).result()


def _measured(label: str, size: int) -> Measurement:
    import ksana_jax.engine.llm  # noqa: F401  so that its memory is not the case's

    Path("/proc/self/clear_refs").write_text("5")  # restarts the count of the peak
    before = _memory("VmRSS")
    found = SERIES[label].measure(size)
    taken = _memory("VmHWM") - before
    predicted = {} if found.predicted_s is None else {"predicted_s": found.predicted_s}
    seconds = {"step_s": max(found.step_s, _SHORTEST_S), **predicted}
    return {**seconds, "memory_bytes": taken, "compilations": found.compilations}


def _memory(name: str) -> int:
    """Returns bytes that Linux counts of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


@dataclasses.dataclass
class Growth(Bench):
    """Measures how time and memory grow, and fits exponents to the upper half of the sizes."""

    WARM_TURN = False

    largest: int = option(2**20, "leaves out larger sizes")
    only: str = option("", "measures only the costs whose names contain this")

    def title(self) -> str:
        return "Growth of time and memory"

    def cases(self) -> list[Case]:
        chosen = {name: series for name, series in SERIES.items() if self.only in name}
        cases = [Case(name, {"size": n}) for name, s in chosen.items() for n in s.sizes if n <= self.largest]
        if not cases:
            raise ConfigError(f"no cost is called {self.only!r} and has a size up to {self.largest}")
        return cases

    def start(self) -> None:
        os.environ.setdefault("KSANA_PROGRAMS", "off")

    def measure(self, case: Case) -> Measurement:
        return in_own_process(case.label, case.point["size"])

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        return [
            Column("step_s", "time, ms", milliseconds(3)),
            spread("step_s"),
            Column("predicted_s", "roofline, ms", milliseconds(3)),
            Column("memory_bytes", "memory, MiB", Scaled(2**-20, 1), exact=True),
        ]

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        fits = []
        for label, members in _by_label(rows):
            found = {words: exponents(members, key) for key, words in (("step_s", "time"), ("memory_bytes", "memory"))}
            said = [f"{words} {of[0]:.2f} to {of[1]:.2f}" for words, of in found.items() if of]
            fits += [f"{label}: {', '.join(said)}, work {SERIES[label].work}"] * bool(said)
        return [
            "Exponents by least squares on logarithms of the upper half of the sizes, from the smallest to the largest "
            "over repetitions. " + "; ".join(fits) + ".",
            *super().notes(rows),
        ]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        """Draws each cost's time over its size, both relative to the smallest size."""
        axes = figure.subplots()
        for index, (label, members) in enumerate(_by_label(rows)):
            times = [(row.point["size"] / members[0].point["size"], row.mean("step_s")) for row in members]
            sizes, seconds = zip(*((size, mean) for size, mean in times if mean), strict=True)
            axes.loglog(sizes, np.divide(seconds, seconds[0]), label=label, marker="o", **line_style(index))
        plain_numbers(axes.xaxis, axes.yaxis)
        axes.set_xlabel("size, relative to the smallest")
        axes.set_ylabel("time, relative to the smallest's")
        legend(figure, axes)


def _by_label(rows: Sequence[ResultRow]) -> list[tuple[str, list[ResultRow]]]:
    measured = [row for row in rows if row.values]
    return [(label, list(members)) for label, members in itertools.groupby(measured, lambda row: row.label)]


def exponents(rows: Sequence[ResultRow], key: str) -> tuple[float, float] | None:
    """Returns the smallest and the largest exponent over repetitions of a number, by least squares on logarithms of the
    upper half of the sizes; None for a single size, or where it is not positive."""
    upper = rows[len(rows) // 2 :] if len(rows) > 3 else rows
    turns = zip(*([m[key] for m in row.trials[0] if m["metric"] == "repetition"] for row in upper), strict=False)
    sizes = [math.log(row.point["size"]) for row in upper]
    found = sorted(float(np.polyfit(sizes, np.log(n), 1)[0]) for n in turns if len(n) > 1 and min(n) > 0)
    return (found[0], found[-1]) if found else None
