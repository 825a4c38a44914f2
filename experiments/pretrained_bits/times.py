"""python -m experiments.pretrained_bits.times [CODEC ...]: times decode steps of one row after LENGTH tokens."""

from __future__ import annotations

import statistics
import sys
from typing import Any

import numpy as np

from ksana_jax import LLM, SamplingParams

LENGTH, STEPS = 4096, 40
CODECS = ("f32", "int4", "hadamard4", "turboquant4", "kivi4")


def time_steps(model: str, length: int, rows: dict[str, dict[str, Any]]) -> None:
    """Prints the times of decode steps after `length` random tokens. Engines are in one process and take turns.

    Args:
      rows: settings of each engine, by name.
    """
    prompt = np.random.default_rng(0).integers(100, 40_000, length).astype(np.int32)
    asked = SamplingParams(temperature=0, max_tokens=STEPS + 60, ignore_eos=True, detokenize=False)
    engines = {}
    for name, given in rows.items():
        settings = {"max_num_seqs": 1, "max_num_batched_tokens": 512, "async_scheduling": False} | given
        engine = LLM(model, max_model_len=length + 192, **settings).engine
        engine.add_request(prompt, asked)
        while not (engine.records and engine.records[-1].num_decodes):
            engine.step()
        for _ in range(4):  # the first ones compile
            engine.step()
        engines[name] = engine
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(STEPS):
        for name, engine in engines.items():
            engine.step()
            times[name].append(1e3 * (engine.records[-1].ended_s - engine.records[-1].began_s))
    for name, ms in times.items():
        print(f"{name:12} {statistics.median(ms):6.1f} ms a step, fastest {min(ms):.1f}", flush=True)


if __name__ == "__main__":
    time_steps("smollm2", LENGTH, {codec: {"kv_cache_dtype": codec} for codec in sys.argv[1:] or CODECS})
