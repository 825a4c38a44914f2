"""Compares predicted with measured memory.

    python -m experiments.benches.peak_memory MODEL [--dtype bf16 --max-num-seqs 8 ...]

Peak resident memory covers everything a process has done, so the comparison needs its own process. MODEL is the
argument of `LLM`; for a directory without weights, random ones are drawn.
"""

from __future__ import annotations

import argparse
import json

import jax
import numpy as np

from ksana_jax.core.request import SamplingParams
from ksana_jax.lab.bench.latency import make_llm
from ksana_jax.scheduler.step.ladders import all_shapes


def check(model: str, *, rounds: int = 2, **settings) -> dict:
    """Loads a model, warms up, and serves more requests than can run at once, `rounds` times.

    Args:
      settings: keyword arguments of `LLM`; without memory_fraction, only weights and pool are predicted.

    Returns:
      {"predicted", "measured"} in bytes for weights, pool, step and peak; peak_error, predicted / measured peak - 1;
      peak_after_rounds, the measured peak after warm-up and each round; num_steps, the number of compiled steps.
    """
    # Cached programs would skip the compiler, whose memory is part of the prediction.
    jax.config.update("jax_enable_compilation_cache", False)
    llm = make_llm(model, **settings)
    sampled = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, detokenize=False, seed=0)
    llm.warm_up(sampling_params=sampled)
    peaks = [llm.memory_usage()["peak"].measured]
    rng, longest = np.random.default_rng(0), llm.engine.max_model_len - 8
    for _ in range(rounds):
        lengths = rng.integers(1, longest + 1, 2 * llm.config.max_num_seqs)
        prompts = [{"prompt_token_ids": rng.integers(3, llm.model_config.vocab_size, n)} for n in lengths]
        llm.generate(prompts, sampled)
        peaks.append(llm.memory_usage()["peak"].measured)
    found = llm.memory_usage()
    peak = found["peak"]
    return {
        **{name: compared._asdict() for name, compared in found.items()},
        "peak_error": peak.predicted / peak.measured - 1 if peak.predicted and peak.measured else None,
        "peak_after_rounds": peaks,
        "num_steps": len(all_shapes(llm.engine.builder.buckets)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.benches.peak_memory", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--memory-fraction", type=float, default=0.5)
    parser.add_argument("--embedding-device", default="device")
    for name in ("--max-num-seqs", "--max-model-len", "--max-num-batched-tokens", "--num-blocks", "--rounds"):
        parser.add_argument(name, type=int)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    print(json.dumps(check(**given)))


if __name__ == "__main__":
    main()
