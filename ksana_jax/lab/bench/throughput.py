"""`ksana bench throughput`: output tokens per second. `experiments/benches/throughput.py` adds other engines."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ksana_jax.core import checks
from ksana_jax.core.errors import ConfigError
from ksana_jax.core.sources import MODEL_HELP
from ksana_jax.lab.bench.core import Bench, Case, Unavailable, option, spread
from ksana_jax.lab.runs.asking import forced
from ksana_jax.lab.runs.tasks.results import Column, Measurement, ResultRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ksana_jax import LLM

OURS, STEPS, EVICTING, BOUND = "ksana_jax", "ksana_jax, steps together", "ksana_jax, evicting", "bound"
OWN = (OURS, STEPS)
MAX_MODEL_LEN = 512
MOST_TOKENS = (256, 128)  # of a prompt and an output, unless they are given
# Share of each output's tokens for warm-up: it meets all numbers of rows in an eighth of the steps.
WARM_SHARE = 8


def workload(
    vocab_size: int, num_requests: int, seed: int, prompt_tokens: int | None = None, output_tokens: int | None = None
) -> tuple[list[list[int]], list[int]]:
    """Returns prompts of random tokens, and for each its number of output tokens: prompts of 32 to 256 tokens and
    outputs of 16 to 128, or 128 of both if there is only one request, unless the numbers are given."""
    import numpy as np

    rng = np.random.default_rng(seed)
    counts, lengths = (rng.integers(32, MOST_TOKENS[0] + 1, num_requests) if num_requests > 1 else [128]), [128]
    if prompt_tokens is not None:
        counts = [prompt_tokens] * num_requests
    prompts = [rng.integers(3, vocab_size, n).tolist() for n in counts]
    if num_requests > 1:
        lengths = rng.integers(16, MOST_TOKENS[1] + 1, num_requests).tolist()
    return prompts, lengths if output_tokens is None else [output_tokens] * num_requests


@dataclasses.dataclass
class Throughput(Bench):
    """Measures output tokens per second, prompts included: prompts of 32 to 256 tokens, outputs of 16 to 128, greedy.

    One request has a prompt and an output of 128 tokens. With --kv-eviction, also how many requests a pool of as many
    bytes serves at once if they evict."""

    model: str = option("ksana-tiny", MODEL_HELP)
    dtype: str = option("f32", "f32, bf16 or f16")
    quantization: str | None = option(None, "of the weights: int8, w8a8 or stored")
    requests: tuple[int, ...] = option((32,), "numbers of requests, all submitted at the start")
    prompt_tokens: int | None = option(None, "tokens of each prompt")
    output_tokens: int | None = option(None, "tokens of each output")
    seed: int = option(0, "seed for weights, lengths and prompts")
    num_blocks: int | None = option(None, "blocks in the pool; as many as all requests need if it is not given")
    num_scheduler_steps: int = option(8, "decode steps in one call, of a second row of this engine; 1 leaves it out")
    kv_eviction: dict[str, Any] | None = option(None, "KV eviction as in YAML, such as '{method: h2o, budget: 0.2}'")

    def title(self) -> str:
        return f"Output tokens per second of {self.model}, {self.dtype}"

    def cases(self) -> list[Case]:
        from ksana_jax.kv.eviction import read_eviction

        read_eviction(self.kv_eviction)
        counts = [checks.integer("requests", count) for count in self.requests]
        sizes = {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        counts += [checks.integer(name, size) for name, size in sizes.items() if size is not None]
        checks.require(*counts, checks.integer("num_scheduler_steps", self.num_scheduler_steps), error=ConfigError)
        return [Case(label, {"requests": count}) for count in self.requests for label in (BOUND, *self.labels())]

    def labels(self) -> list[str]:
        """Returns the labels of the rows that serve requests."""
        return [OURS] + [STEPS] * (self.num_scheduler_steps > 1) + [EVICTING] * bool(self.kv_eviction)

    # ------------------------------------------------------------------ measuring

    def start(self) -> None:
        from ksana_jax.lab.bench.latency import make_llm

        self.ours: dict[int, list[list[int]]] = {}
        self.bound_s: dict[int, float] = {}  # by number of requests
        model = self.checkpoint()
        longest = (self.prompt_tokens or MOST_TOKENS[0]) + (self.output_tokens or MOST_TOKENS[1])
        self.max_model_len = max(MAX_MODEL_LEN, longest)
        settings = {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "max_num_seqs": max(self.requests),
            "max_model_len": self.max_model_len,
        }
        make = functools.partial(make_llm, model, num_blocks=self.num_blocks, seed=self.seed, **settings)
        self.llms = {OURS: make()}
        if self.num_scheduler_steps > 1:
            self.llms[STEPS] = make(num_scheduler_steps=self.num_scheduler_steps)
        if self.kv_eviction:
            full = self.llms[OURS]
            settings |= {"kv_eviction": self.kv_eviction, "memory_bytes": full.num_blocks * full.block_bytes}
            self.llms[EVICTING] = make_llm(model, seed=self.seed, **settings)
        for llm in self.llms.values():
            llm.warm_up(longest)

    def checkpoint(self) -> str:
        """Returns the model that all engines load."""
        return self.model

    def serve(
        self, label: str, prompts: list[list[int]], lengths: list[int]
    ) -> tuple[float, list[list[int]], Measurement]:
        """Serves the requests of a row; returns as `run` does."""
        return run(self.llms[label], prompts, lengths)

    def measure(self, case: Case) -> Measurement:
        count = case.point["requests"]
        vocab_size = self.llms[OURS].model_config.vocab_size
        prompts, lengths = workload(vocab_size, count, self.seed, self.prompt_tokens, self.output_tokens)
        if case.label == BOUND:
            return self._bound(prompts, lengths)
        if self.warming:
            lengths = [-(-n // WARM_SHARE) for n in lengths]
        seconds, token_ids, found = self.serve(case.label, prompts, lengths)
        if case.label == OURS:
            self.ours[count] = token_ids
        equal = sum(a == b for a, b in zip(token_ids, self.ours[count], strict=True))
        found |= {"output_tokens_per_s": sum(lengths) / seconds, "run_s": seconds, "same_tokens": equal}
        return found | ({"of_bound": self.bound_s[count] / seconds} if count in self.bound_s else {})

    def _bound(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Measurement:
        import jax

        from ksana_jax.lab.bench.bounds import measure_rates, work_of

        if self.llms[OURS].model_config.experts is not None:
            raise Unavailable("absent, a step reads only the experts that its tokens choose")
        if self.llms[OURS].model_config.recurrent is not None:
            raise Unavailable("absent, it does not count the states of recurrent layers")
        llm, read = self.llms[OURS], None
        if self.quantization is not None:
            params = llm.runner.params
            read = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            read -= 0 if params.head is None else sum(leaf.nbytes for leaf in jax.tree.leaves(params.embed))
        work = work_of(llm.model_config, self.dtype, [len(p) for p in prompts], lengths, read)
        rates = measure_rates(self.dtype, round(work.num_bytes / max(lengths)))
        self.bound_s[len(prompts)] = seconds = work.seconds(rates)
        return {"output_tokens_per_s": sum(lengths) / seconds, "run_s": seconds, **rates._asdict()}

    # ------------------------------------------------------------------ results

    def columns(self, rows: Sequence[ResultRow]) -> list[Column]:
        found = [
            Column("output_tokens_per_s", "output tokens/s", lambda value: f"{value:,.0f}"),
            spread("output_tokens_per_s"),
            Column("of_bound", "of the bound", lambda value: f"{value:.0%}"),
        ]
        if any(row.label not in (*OWN, BOUND) for row in rows):
            found.append(Column("same_tokens", "requests with our tokens", lambda value: f"{value:,.0f}"))
        if any(row.label == EVICTING for row in rows):
            found.append(Column("num_blocks", "blocks", lambda value: f"{value:,.0f}", exact=True))
            found.append(Column("running", "requests at once", lambda value: f"{value:,.2f}"))
        return found

    def conclusion(self, rows: Sequence[ResultRow]) -> str:
        """Compares evictions with none."""
        return " ".join(
            f"{what}: evicting gives {rates[EVICTING] / rates[OURS]:.2f} times the output tokens/s."
            for what, rates in rates_by_count(rows).items()
            if OURS in rates and EVICTING in rates
        )

    def notes(self, rows: Sequence[ResultRow]) -> list[str]:
        turns = [(row.label, m) for row in rows for t in row.trials for m in t if m["metric"] == "repetition"]
        said = []
        if rates := [m for label, m in turns if label == BOUND]:
            gigabytes, gigaflop = (max(m[key] for m in rates) / 1e9 for key in ("bytes_per_s", "flop_per_s"))
            said.append(
                f"Bound: the longer of reading weights, keys and values at {gigabytes:,.1f} GB/s and of the products "
                f"at {gigaflop:,.0f} GFLOP/s, measured in the same turns; prompts included."
            )
        if any(row.label == STEPS for row in rows):
            said.append(f"Steps together: num_scheduler_steps={self.num_scheduler_steps}, decode steps in one call.")
        if any(row.label == EVICTING for row in rows):
            said.append(
                "Evicting: a pool of as many bytes. Requests at once: mean of those that run while others wait for "
                "room; none if none waits."
            )
        return [*said, *super().notes(rows)]

    def draw(self, figure: Figure, rows: Sequence[ResultRow]) -> None:
        from ksana_jax.lab.runs.tasks.row_figure import draw_columns

        draw_columns(figure, [row for row in rows if row.values], self.columns(rows)[:1])


def run(llm: LLM, prompts: Sequence[list[int]], lengths: Sequence[int]) -> tuple[float, list[list[int]], Measurement]:
    """Serves requests that arrive at once; returns seconds, tokens, and counts.

    Counts: steps, num_blocks, block_bytes, the implementation of attention; running is the mean number of requests that
    ran while others waited for room, None if none waited.
    """
    params = [forced(n, temperature=0) for n in lengths]
    requests = [{"prompt_token_ids": p} for p in prompts]
    llm.clear_records()
    began = time.perf_counter()
    outputs = llm.generate(requests, params)
    seconds = time.perf_counter() - began
    running = [record.num_running for record in llm.records if record.num_waiting]
    found = {
        "steps": len(llm.records),
        "num_blocks": llm.num_blocks,
        "block_bytes": llm.block_bytes,
        "implementation": llm.runner.implementation.name,
        "running": sum(running) / len(running) if running else None,
    }
    return seconds, [output.check().outputs[0].token_ids for output in outputs], found


def rates_by_count(rows: Sequence[ResultRow]) -> dict[str, dict[str, float]]:
    """Returns {"32 requests": {label: output tokens per second}} of the rows that were measured."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if rate := row.mean("output_tokens_per_s"):
            count = row.point["requests"]
            found.setdefault(f"{count:,} requests" if count > 1 else "1 request", {})[row.label] = rate
    return found
