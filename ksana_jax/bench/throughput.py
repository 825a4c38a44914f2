"""Measures output tokens per second on a mixed batch; `experiments.peers` times transformers on the same batch."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from ksana_jax.engine.llm import LLM
from ksana_jax.kv.eviction import read_eviction
from ksana_jax.request import SamplingParams
from ksana_jax.shipped import model_path
from ksana_jax.units import byte_size


def workload(vocab_size: int, num_requests: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Returns prompts of 32 to 256 random tokens, and for each its number of output tokens, 16 to 128."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, vocab_size, n).tolist() for n in rng.integers(32, 257, num_requests)]
    return prompts, rng.integers(16, 129, num_requests).tolist()


def run(model: str, *, dtype: str, num_requests: int = 32, seed: int = 0, repeats: int = 3, **settings) -> dict:
    """Times the workload on the engine after warm-up, with greedy sampling and EOS ignored.

    Returns:
      output_tokens_per_s (median over repeats, prompt time included), seconds (of that repeat), and the environment.
      running is the mean number of requests that ran while others waited for room, None if none waited. token_ids
      holds the output of each request.
    """
    directory = model_path(model)
    if "load_format" not in settings and directory.is_dir() and not any(directory.glob("model.safetensors*")):
        settings["load_format"] = "dummy"
    llm = LLM(model, dtype=dtype, max_num_seqs=num_requests, max_model_len=512, **settings)
    prompts, lengths = workload(llm.model_config.vocab_size, num_requests, seed)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    requests = [{"prompt_token_ids": p} for p in prompts]
    started = time.perf_counter()
    llm.warm_up(max(len(p) + n for p, n in zip(prompts, lengths, strict=True)))
    warm_up_s, compiled = time.perf_counter() - started, llm.num_compilations
    llm.generate(requests, params)
    seconds, token_ids = [], []
    for _ in range(repeats):
        llm.clear_records()
        started = time.perf_counter()
        outputs = llm.generate(requests, params)
        seconds.append(time.perf_counter() - started)
        token_ids = [o.outputs[0].token_ids for o in outputs]
    median = float(np.median(seconds))
    running = [record.num_running for record in llm.records if record.num_waiting]
    return {
        "output_tokens_per_s": round(sum(lengths) / median, 1),
        "seconds": round(median, 3),
        "seconds_of_repeats": [round(s, 3) for s in seconds],
        "output_tokens": sum(lengths),
        "prompt_tokens": sum(map(len, prompts)),
        "requests": num_requests,
        "steps": len(llm.records),
        "num_blocks": llm.num_blocks,
        "block_bytes": llm.block_bytes,
        "running": round(float(np.mean(running)), 2) if running else None,
        "dtype": dtype,
        "implementation": llm.runner.implementation.name,
        "platform": llm.runner.platform,
        "warm_up_s": round(warm_up_s, 1),
        "compilations": compiled,
        "compilations_after_warmup": llm.num_compilations - compiled,
        "token_ids": token_ids,
    }


def main(
    model: str,
    dtype: str = "f32",
    num_requests: int = 32,
    seed: int = 0,
    as_json: bool = False,
    num_blocks: int | None = None,
    kv_eviction: dict[str, Any] | None = None,
) -> None:
    """Prints the measurement; with as_json, the last line is one JSON object.

    Args:
      num_blocks: blocks in the pool; None takes as many as all requests need.
      kv_eviction: as `EngineConfig.kv_eviction`: compares a pool that keeps everything with one of as many bytes whose
        rows evict, in a table.
    """
    read_eviction(kv_eviction)
    settings = {"dtype": dtype, "num_requests": num_requests, "seed": seed, "num_blocks": num_blocks}
    result = run(model, **settings)
    del result["token_ids"]
    print(
        "{requests} requests, {prompt_tokens:,} prompt and {output_tokens:,} output tokens in {seconds:.2f} s: "
        "{output_tokens_per_s:,.0f} output tokens/s ({dtype}, {implementation} on {platform})".format(**result)
    )
    print("{compilations} compilations in {warm_up_s:.0f} s, {compilations_after_warmup} after that".format(**result))
    if kv_eviction is not None:
        pool_bytes = result["num_blocks"] * result["block_bytes"]
        evicting = run(model, kv_eviction=kv_eviction, **settings | {"num_blocks": None, "memory_bytes": pool_bytes})
        del evicting["token_ids"]
        result["evicting"] = evicting | {"kv_eviction": kv_eviction}
        _compare(result, evicting, kv_eviction)
    if as_json:
        print(json.dumps(result))


def _compare(full: dict, evicting: dict, kv_eviction: dict[str, Any]) -> None:
    """Prints what pools of as many bytes serve with and without evictions."""
    name = ", ".join(f"{key} {value}" for key, value in kv_eviction.items())
    width = max(len(name), len("everything"))
    pool_bytes = byte_size(full["num_blocks"] * full["block_bytes"])
    print(f"\na pool of {pool_bytes}; requests are those that run at once while others wait for room")
    print(f"{'keeps':{width}} {'blocks':>7} {'requests':>9} {'steps':>7} {'output tokens/s':>16}")
    for label, r in (("everything", full), (name, evicting)):
        running = "all" if r["running"] is None else f"{r['running']:.2f}"
        print(f"{label:{width}} {r['num_blocks']:7,} {running:>9} {r['steps']:7,} {r['output_tokens_per_s']:16,.0f}")
    if full["running"] and evicting["running"]:
        requests, speed = (evicting[key] / full[key] for key in ("running", "output_tokens_per_s"))
        print(f"{requests:.2f} times the requests at once, {speed:.2f} times the output tokens/s")
