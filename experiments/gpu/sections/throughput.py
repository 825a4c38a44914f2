"""Output tokens a second of the engine on the workload of `ksana bench throughput`, on a model of Llama-8B's shape."""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.gpu.compiling import compile_in_parallel
from experiments.gpu.context import Context
from experiments.gpu.llama import LLAMA_8B, SMALL, operators, random_params
from ksana_jax.core.config import ModelConfig
from ksana_jax.scheduler.step.ladders import all_shapes

if TYPE_CHECKING:
    from ksana_jax.engine.llm import LLM

REQUESTS = 64
FIRST_RUN = "requests on Llama-8B's shape"


def run(context: Context) -> None:
    from ksana_jax.core.request import SamplingParams
    from ksana_jax.lab.bench.throughput import workload

    config, requests = (SMALL, 4) if context.tiny else (LLAMA_8B, REQUESTS)
    prompts, lengths = workload(config.vocab_size, requests, 0)
    if context.tiny:
        lengths = [min(n, 6) for n in lengths]
    llm = _make_llm(context, config, requests)
    _compile_ahead(context, llm)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in lengths]
    asked = [{"prompt_token_ids": p} for p in prompts]
    name = llm.runner.implementation.name
    with context.guard(name, FIRST_RUN, seconds=60):  # compilation included
        llm.generate(asked[:2], params[:2])
    context.timing_begins()
    compiled, seconds = llm.num_compilations, _time(context, llm, asked, params)
    compiled = llm.num_compilations - compiled
    context.record(
        "throughput",
        who="ksana_jax",
        implementation=name,
        seconds=seconds,
        output_tokens=sum(lengths),
        prompt_tokens=sum(map(len, prompts)),
        steps=len(llm.records),
        compilations_after_warm_up=compiled,
    )
    tokens_per_s = sum(lengths) / float(np.median(seconds))
    context.value(f"throughput, {requests} requests: ksana_jax ({name})", tokens_per_s, "output tokens/s")
    context.value("throughput: programs compiled while timed", compiled, "programs", bar=0, speed=False)
    context.attempt("one request", lambda: _one_request(context, llm, asked[0]))


def _one_request(context: Context, llm: LLM, prompt: Any) -> None:
    """Milliseconds from token to token of a single request, and the host's work meanwhile."""
    from ksana_jax.core.request import SamplingParams

    count = 8 if context.tiny else 200
    seconds = []
    for most in (1, count, 1, count):
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate([prompt], params)
        seconds.append(time.perf_counter() - started)
    ms = (min(seconds[1::2]) - min(seconds[::2])) / (count - 1) * 1e3
    context.value("throughput: one request, from token to token", ms, "ms")
    with cProfile.Profile() as profile:
        llm.generate([prompt], params)
    with (context.out / "host_profile.txt").open("w") as file:
        pstats.Stats(profile, stream=file).strip_dirs().sort_stats("tottime").print_stats(60)


def _make_llm(context: Context, config: ModelConfig, requests: int) -> LLM:
    """An engine for some requests at once, with few shapes of steps instead of a ladder: each costs a compilation,
    and idle rows cost little beyond the weights."""
    from ksana_jax.engine.llm import LLM

    size, chunk, tile = (16, 64, 32) if context.tiny else (64, 1024, 64)
    llm = LLM.from_params(
        config,
        random_params(config),
        dtype="bf16",
        block_size=size,
        num_blocks=requests * (512 // size),
        max_model_len=512,
        max_num_seqs=requests,
        max_num_batched_tokens=chunk,
        query_tile=tile,
        operators=operators(context, FIRST_RUN),
    )
    buckets = llm.engine.builder.buckets
    buckets = dataclasses.replace(
        buckets, decodes=(min(8, requests), requests), tiles=buckets.tiles[-1:], widths=buckets.widths[-1:]
    )
    llm.engine.builder = dataclasses.replace(llm.engine.builder, buckets=buckets)
    return llm


def _compile_ahead(context: Context, llm: LLM) -> None:
    """Compiles all steps in parallel. Late ones are compiled on first use."""
    name, shapes = llm.runner.implementation.name, all_shapes(llm.engine.builder.buckets)
    with context.guard(name, FIRST_RUN, seconds=60):
        lowered = [(str(i), llm.runner.lower_step(shape)) for i, shape in enumerate(shapes)]
    context.say(f"compiling {len(shapes)} steps")
    programs = compile_in_parallel(
        context, lowered, timeout_s=max(context.left() * 0.6, 5), case=FIRST_RUN, who=lambda _: name
    )
    found = {shapes[int(index)]: p for index, p in programs.items() if not isinstance(p, Exception)}
    llm.runner._compiled |= found
    late = {index: str(p)[:300] for index, p in programs.items() if isinstance(p, Exception)}
    context.record("fact", name="steps compiled ahead", compiled=len(found), late=late)
    context.say(f"compiled {len(found)} of {len(shapes)}")


def _time(context: Context, llm: LLM, asked: list, params: list) -> list[float]:
    """Seconds of each of three runs, or of fewer where the time is short."""
    seconds: list[float] = []
    for _ in range(3):
        if seconds and context.left() < 2 * seconds[-1] + 1:
            break
        llm.clear_records()
        started = time.perf_counter()
        llm.generate(asked, params)
        seconds.append(time.perf_counter() - started)
    return seconds
