"""Times grammars on SmolLM2; sides take turns, and seconds are of the wall and of CPU.

python -m experiments.grammar.speed jump 1     forced tokens as drafts, next to none, in steps of a row
python -m experiments.grammar.speed rows 32    rows with grammars, next to rows without that write as many tokens
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.grammar.orders import SCHEMA, is_valid, orders
from ksana_jax import LLM, SamplingParams, StructuredOutputsParams

PAIRS, SEED, MAX_TOKENS = 5, 0, 96
Run = Callable[[], tuple[int, float, float, str]]


def take_turns(sides: dict[str, Run], baseline: str) -> None:
    """Prints tokens/s and ratios: medians of PAIRS rounds after one. Runs return tokens, wall and CPU s, and a note."""
    said = {name: run()[-1] for name, run in sides.items()}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(PAIRS):
        for name, run in sides.items():
            count, wall, cpu, said[name] = run()
            rates[name].append((count / wall, count / cpu))
    for name, found in rates.items():
        (wall, cpu), ratios = np.median(found, axis=0), np.divide(found, rates[baseline])
        per_wall, per_cpu = np.median(ratios, axis=0)
        print(
            f"{name:24} {wall:6.1f} tokens/s x {per_wall:.2f}, by CPU {cpu:6.1f} x {per_cpu:.2f} "
            f"({ratios[:, 1].min():.2f} to {ratios[:, 1].max():.2f}); {said[name]}; load {os.getloadavg()[0]:.1f}"
        )


def engine(rows: int, **settings: Any) -> LLM:
    """Returns an engine that keeps the prompts of earlier runs, so that a run is decoding."""
    given = {"max_num_seqs": rows, "max_model_len": 512, "max_num_batched_tokens": 256, "enable_prefix_caching": True}
    return LLM("smollm2", **(given | settings))


def asked(**given: Any) -> SamplingParams:
    structured = StructuredOutputsParams(json=SCHEMA, **given)
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs=structured)


def ours(llm: LLM, rows: int, params: SamplingParams | list[SamplingParams]) -> Run:
    prompts = [order["json"] for order in orders(rows, SEED)]

    def run() -> tuple[int, float, float, str]:
        llm.clear_records()
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = [o.check() for o in llm.generate(prompts, params)]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        count = sum(len(o.outputs[0].token_ids) for o in outputs)
        accepted = sum(o.metrics.num_accepted_tokens for o in outputs)
        valid = sum(is_valid(o.outputs[0].text) for o in outputs)
        return count, wall, cpu, f"{len(llm.engine.records)} steps, {accepted} drafts accepted, {valid} of {rows} valid"

    return run


def jump(rows: int) -> None:
    methods = {name: {"method": name, "num_speculative_tokens": 4} for name in ("grammar", "ngram")}
    engines = {name: engine(rows, speculative_config=config) for name, config in {"none": None, **methods}.items()}
    for name, given in (("white space", {}), ("compact", {"disable_any_whitespace": True})):
        sides = {f"{name}, {method}": ours(llm, rows, asked(**given)) for method, llm in engines.items()}
        take_turns(sides, f"{name}, none")


def with_and_without(rows: int) -> None:
    llm, params = engine(rows), asked()
    prompts = [order["json"] for order in orders(rows, SEED)]
    counts = [len(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    free = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    take_turns({"without": ours(llm, rows, free), "with grammars": ours(llm, rows, params)}, "without")


if __name__ == "__main__":
    {"jump": jump, "rows": with_and_without}[sys.argv[1]](int(sys.argv[2]))
