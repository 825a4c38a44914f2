"""Times grammars on SmolLM2; sides take turns, and seconds are of the wall and of CPU.

python -m experiments.grammar.speed jump [ROWS]    forced tokens as drafts, next to none
python -m experiments.grammar.speed rows [ROWS]    rows with grammars, next to rows without that write as many tokens
python -m experiments.grammar.speed llama [PYTHON] llama.cpp's grammars, run by a Python with llama-cpp-python, and ours
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.grammar.orders import SCHEMA, is_valid, orders
from ksana_jax import LLM, SamplingParams, StructuredOutputsParams
from ksana_jax.core.sources import model_path
from ksana_jax.scheduler.step import masks

PAIRS, SEED, NUM_OTHERS, MAX_TOKENS = 5, 0, 3, 96
# A run returns the number of its tokens, its seconds, those of CPU, and what is said about it.
Run = Callable[[], tuple[int, float, float, str]]


def take_turns(sides: dict[str, Run], baseline: str) -> None:
    """Prints tokens/s of each side: medians of PAIRS rounds after one that compiles, and ratios to the baseline."""
    said = {name: run()[-1] for name, run in sides.items()}
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(PAIRS):
        for name, run in sides.items():
            count, wall, cpu, said[name] = run()
            rates[name].append((count / wall, count / cpu))
    for name, found in rates.items():
        ratios = np.divide(found, rates[baseline])
        (wall, cpu), (per_wall, per_cpu) = np.median(found, axis=0), np.median(ratios, axis=0)
        low, high = ratios[:, 1].min(), ratios[:, 1].max()
        print(
            f"{name:24} {wall:6.1f} tokens/s x {per_wall:.2f}, by CPU {cpu:6.1f} x {per_cpu:.2f} ({low:.2f} to "
            f"{high:.2f}); {said[name]}; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def engine(rows: int, **settings: Any) -> LLM:
    """Returns an engine that keeps the prompts of earlier runs, so that a run is decoding."""
    given = {"max_num_seqs": rows, "max_model_len": 512, "max_num_batched_tokens": 256, "enable_prefix_caching": True}
    return LLM("smollm2", **(given | settings))


def asked(**given: Any) -> SamplingParams:
    structured = StructuredOutputsParams(json=SCHEMA, **given)
    return SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs=structured)


def ours(llm: LLM, rows: int, params: SamplingParams | list[SamplingParams]) -> Run:
    prompts = [order["json"] for order in orders(rows, SEED, NUM_OTHERS)]

    def run() -> tuple[int, float, float, str]:
        llm.clear_records()
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = [o.check() for o in llm.generate(prompts, params)]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        accepted = sum(o.metrics.num_accepted_tokens for o in outputs)
        drafted = sum(o.metrics.num_draft_tokens for o in outputs)
        valid = sum(is_valid(o.outputs[0].text) for o in outputs)
        count = sum(len(o.outputs[0].token_ids) for o in outputs)
        steps = len(llm.engine.records)
        said = f"{steps} steps, {accepted} of {drafted} drafts accepted, {valid} of {len(outputs)} valid"
        return count, wall, cpu, said

    return run


def jump(rows: int) -> None:
    plain, sides = engine(rows), {}
    drafting = {
        method: engine(rows, speculative_config={"method": method, "num_speculative_tokens": 4})
        for method in ("grammar", "ngram")
    }
    for name, given in (("white space", {}), ("compact", {"disable_any_whitespace": True})):
        sides = {f"{name}, none": ours(plain, rows, asked(**given))}
        sides |= {f"{name}, {method}": ours(llm, rows, asked(**given)) for method, llm in drafting.items()}
        take_turns(sides, f"{name}, none")


def with_and_without(rows: int) -> None:
    llm, params, times = engine(rows), asked(), []
    prompts = [order["json"] for order in orders(rows, SEED, NUM_OTHERS)]
    counts = [len(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    free = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in counts]
    fill = masks._masks

    def timed(step: Any, sampled: np.ndarray, *given: Any) -> np.ndarray:
        began = time.thread_time()
        found = fill(step, sampled, *given)
        times.append(1e6 * (time.thread_time() - began) / max(len(sampled), 1))
        return found

    masks._masks = timed
    take_turns({"without": ours(llm, rows, free), "with grammars": ours(llm, rows, params)}, "without")
    middle, most = np.quantile(times, [0.5, 0.99])
    print(f"masks: {middle:.0f} us of CPU per row and step, in 99 % of the steps at most {most:.0f}")


def llama(python: str) -> None:
    rows, params = 8, asked()
    prompts = [order["json"] for order in orders(rows, SEED, NUM_OTHERS)]
    plain = engine(rows)
    drafting = engine(rows, speculative_config={"method": "grammar", "num_speculative_tokens": 4})
    decode = plain.tokenizer.decode
    lengths = [len(o.outputs[0].token_ids) for o in plain.generate(prompts, params)]
    free = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in lengths]
    given = {"path": str(model_path("smollm2")), "schema": SCHEMA, "lengths": lengths}
    given |= {"prompts": [plain.tokenizer.encode(text) for text in prompts]}
    worker = [python, str(Path(__file__).with_name("llama_worker.py"))]
    peer = subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None and peer.stdout is not None
    sent, answers = peer.stdin, peer.stdout

    def exchange(message: Any) -> Any:
        sent.write(json.dumps(message) + "\n")
        sent.flush()
        return json.loads(answers.readline())

    def theirs(grammar: bool) -> tuple[int, float, float, str]:
        found = exchange(grammar)
        valid = sum(is_valid(decode(ids)) for ids in found["outputs"])
        return sum(lengths), found["wall_s"], found["cpu_s"], f"{valid} of {rows} valid"

    print(exchange(given | {"threads": len(os.sched_getaffinity(0))}))
    sides: dict[str, Run] = {"llama.cpp": lambda: theirs(True), "llama.cpp, free": lambda: theirs(False)}
    sides |= {"ksana": ours(plain, rows, params), "ksana, jump forward": ours(drafting, rows, params)}
    take_turns(sides | {"ksana, free": ours(plain, rows, free)}, "llama.cpp")
    sent.close()
    peer.wait()


if __name__ == "__main__":
    mode, *rest = sys.argv[1:] or ["jump"]
    if mode == "llama":
        llama(rest[0] if rest else ".venv-peers/bin/python")
    else:
        {"jump": jump, "rows": with_and_without}[mode](int(rest[0]) if rest else {"jump": 1, "rows": 32}[mode])
