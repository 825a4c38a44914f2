"""python -m experiments.pretrained_bits.times [CODEC ...]: times decode steps of one row after LENGTH tokens.

The engines are in one process and take turns.
"""

from __future__ import annotations

import statistics
import sys

import numpy as np

from ksana_jax import LLM, SamplingParams

LENGTH, STEPS = 4096, 40
CODECS = ("f32", "int4", "hadamard4", "turboquant4", "kivi4")


def main(*codecs: str) -> None:
    prompt = np.random.default_rng(0).integers(100, 40_000, LENGTH).astype(np.int32)
    asked = SamplingParams(temperature=0, max_tokens=STEPS + 60, ignore_eos=True, detokenize=False)
    engines = {}
    for codec in codecs or CODECS:
        settings = {"max_num_seqs": 1, "max_num_batched_tokens": 512, "async_scheduling": False}
        engine = LLM("smollm2", max_model_len=LENGTH + 192, kv_cache_dtype=codec, **settings).engine
        engine.add_request(prompt, asked)
        while not (engine.records and engine.records[-1].num_decodes):
            engine.step()
        for _ in range(4):  # the first ones compile
            engine.step()
        engines[codec] = engine
    times: dict[str, list[float]] = {codec: [] for codec in engines}
    for _ in range(STEPS):
        for codec, engine in engines.items():
            engine.step()
            times[codec].append(1e3 * (engine.records[-1].ended_s - engine.records[-1].began_s))
    for codec, ms in times.items():
        print(f"{codec:12} {statistics.median(ms):6.1f} ms a step, fastest {min(ms):.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
