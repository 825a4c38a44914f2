"""Output tokens a second of the engine on the workload of `ksana bench throughput`, on a model of Llama-8B's shape."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from experiments.gpu.context import Context
from experiments.gpu.llama import LLAMA_8B, SMALL, random_params
from experiments.gpu.timing import compile_in_parallel

REQUESTS = 64
FIRST_RUN = "requests on Llama-8B's shape"


def run(context: Context) -> None:
    from ksana_jax.bench.throughput import workload
    from ksana_jax.engine.llm import LLM
    from ksana_jax.ops.implementations import IMPLEMENTATIONS
    from ksana_jax.request import SamplingParams

    config, requests = (SMALL, 4) if context.tiny else (LLAMA_8B, REQUESTS)
    prompts, lengths = workload(config.vocab_size, requests, 0)
    if context.tiny:
        lengths = [min(n, 6) for n in lengths]
    size, chunk, tile = (16, 64, 32) if context.tiny else (64, 1024, 64)
    llm = LLM.from_params(
        config, random_params(config), dtype="bf16", block_size=size, num_blocks=requests * (512 // size),
        max_model_len=512, max_num_seqs=requests, max_num_batched_tokens=chunk, query_tile=tile,
    )  # fmt: skip
    if context.excluded(llm.runner.implementation.name, FIRST_RUN):
        llm.runner.implementation = next(i for i in IMPLEMENTATIONS if i.name == "xla")
    # Three shapes in place of a ladder: each costs a compilation, and rows that idle cost little beside the weights.
    buckets = llm.engine.builder.buckets
    buckets = dataclasses.replace(buckets, singles=(requests,), tiles=buckets.tiles[-1:], widths=buckets.widths[-1:])
    llm.engine.builder = dataclasses.replace(llm.engine.builder, buckets=buckets)
    shapes = buckets.all_shapes()
    lowered = [(str(i), llm.runner.lower_step(shape)) for i, shape in enumerate(shapes)]
    context.say(f"compiling {len(shapes)} steps")
    for index, program in compile_in_parallel(lowered, timeout_s=max(context.left() - 10, 5)).items():
        if isinstance(program, Exception):
            raise program
        llm.runner._compiled[shapes[int(index)]] = program
    context.say("compiled")
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    asked = [{"prompt_token_ids": p} for p in prompts]
    with context.guard(llm.runner.implementation.name, FIRST_RUN, seconds=25):
        llm.generate(asked[:2], params[:2])
    compiled, seconds = llm.num_compilations, []
    for _ in range(3):
        if seconds and context.left() < 2 * seconds[-1] + 1:
            break
        llm.clear_records()
        started = time.perf_counter()
        llm.generate(asked, params)
        seconds.append(time.perf_counter() - started)
    median = float(np.median(seconds))
    context.record("throughput", who="ksana_jax", implementation=llm.runner.implementation.name, seconds=seconds,
                   output_tokens=sum(lengths), prompt_tokens=sum(map(len, prompts)), steps=len(llm.records),
                   compilations_after_warm_up=llm.num_compilations - compiled)  # fmt: skip
    context.value(f"throughput, {requests} requests: ksana_jax ({llm.runner.implementation.name})",
                  sum(lengths) / median, "output tokens/s")  # fmt: skip
    context.value("throughput: programs compiled while timed", llm.num_compilations - compiled, "programs", bar=0,
                  speed=False)  # fmt: skip
