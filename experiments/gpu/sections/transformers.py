"""Continuous batching of transformers on the same workload and shape, in a process of torch."""

from __future__ import annotations

import json
import subprocess
import time

from experiments.gpu.context import Context
from experiments.gpu.llama import LLAMA_8B, SMALL
from experiments.gpu.sections.throughput import REQUESTS
from ksana_jax.lab.bench.throughput import workload


def run(context: Context) -> None:
    config, requests = (SMALL, 4) if context.tiny else (LLAMA_8B, REQUESTS)
    prompts, lengths = workload(config.vocab_size, requests, 0)
    if context.tiny:
        lengths = [min(n, 6) for n in lengths]
    task = {
        "prompts": prompts,
        "lengths": lengths,
        "ends_in_s": context.left() - 3,
        "config": {
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.d_ff,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "rope_theta": config.layers[0].attention.rope.theta,
            "max_position_embeddings": config.max_position,
            "tie_word_embeddings": False,
        },
    }
    process = subprocess.Popen(
        [context.peer_python, "-m", "experiments.gpu.transformers_peer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.close()
    best = 0.0
    for line in process.stdout:
        try:
            result = json.loads(line)
        except ValueError:
            continue  # what libraries print
        if "error" in result:
            context.record("failed", what=result["way"], reason=result["error"], unsupported=False, trace="")
            context.say(f"{result['way']}: {result['error']}")
            continue
        rate = sum(lengths) / min(result["seconds"])
        best = max(best, rate)
        context.record("throughput", who="transformers", output_tokens=sum(lengths), **result)
        context.value(f"throughput, {requests} requests: transformers, {result['way']}", rate, "output tokens/s")
    code = process.wait(timeout=max(context.left(), 1))
    if not best:
        raise RuntimeError(f"transformers measured nothing (exit status {code}, {time.ctime()})")
