"""A decode step of a model of Llama-8B's shape: on the device alone, and with all that the host does."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import numpy as np

from experiments.gpu.context import Context
from experiments.gpu.llama import LLAMA_8B, SMALL, filled, random_params, weight_bytes
from experiments.gpu.timing import Dispatched, compile_in_parallel, rounds

BAR_MS = 4.65  # of one row
STEPS = 10
FIRST_RUN = "a step of Llama-8B's shape"


def run(context: Context) -> None:
    from ksana_jax.engine.llm import LLM
    from ksana_jax.ops.implementations import IMPLEMENTATIONS

    config = SMALL if context.tiny else LLAMA_8B
    sizes = ((1, 64), (4, 32)) if context.tiny else ((1, 1024), (64, 2048), (256, 1024))
    params = random_params(config)
    context.say(f"weights: {weight_bytes(params) / 1e9:.2f} GB are read in a step")
    longest, most = max(n for _, n in sizes), max(b for b, _ in sizes)
    size = 16 if context.tiny else 64
    num_blocks = max(batch * -(-text // size) for batch, text in sizes) + 8
    llm = LLM.from_params(
        config, params, dtype="bf16", block_size=size, num_blocks=num_blocks, max_model_len=longest + size,
        max_num_seqs=most, max_num_batched_tokens=512,
    )  # fmt: skip
    runner = llm.runner
    runner.cache = filled(runner.cache)
    if context.excluded(runner.implementation.name, FIRST_RUN):
        runner.implementation = next(i for i in IMPLEMENTATIONS if i.name == "xla")
    name = runner.implementation.name
    pool_bytes = runner.cache.blocks.nbytes
    context.record("fact", name="step", who=name, weight_bytes=weight_bytes(params), pool_bytes=pool_bytes)
    shapes = {}
    for batch, text in sizes:
        shapes[batch] = llm.engine.builder.buckets.shape(batch, 0, -(-text // size))
    _compile(context, runner, shapes)
    for batch, text in sizes:
        if shapes[batch] in runner.programs and context.left() > 3:
            label = f"{batch} rows of {text}, {name}"
            time_it = functools.partial(_time, context, llm, shapes[batch], batch, text, label)
            context.attempt(f"step of {label}", time_it)


def _compile(context: Context, runner, shapes: dict[int, Any]) -> None:
    lowered = []
    for batch, shape in shapes.items():
        started = time.perf_counter()
        low = context.attempt(f"lowering the step of {batch} rows", lambda s=shape: runner.lower_step(s))
        if low is not None:
            lowered.append((str(batch), low))
        context.value(f"lowering the step of {batch} rows", time.perf_counter() - started, "s")
    started = time.perf_counter()
    compiled = compile_in_parallel(lowered, timeout_s=max(context.left() - 15, 5))
    context.value(f"compiling {len(lowered)} steps at once", time.perf_counter() - started, "s")
    for batch, program in compiled.items():
        if isinstance(program, Exception):
            context.failed(f"compiling the step of {batch} rows", program)
            continue
        runner._compiled[shapes[int(batch)]] = program  # what `Runner.compile_step` would keep
        memory = program.memory_analysis()
        if memory is not None:
            context.record("fact", name="memory of a step", rows=batch, aliased=memory.alias_size_in_bytes,
                           temporary=memory.temp_size_in_bytes, arguments=memory.argument_size_in_bytes)  # fmt: skip


def _time(context: Context, llm, shape, batch: int, text: int, label: str) -> None:
    from ksana_jax.kv.patterns import FAR
    from ksana_jax.step import StepArrays, StepInput

    runner, size = llm.runner, llm.config.block_size
    rows, width, blocks = shape.num_singles, shape.table_width, -(-text // llm.config.block_size)
    ids = np.random.default_rng(0).permutation(runner.cache.num_blocks)[: batch * blocks].reshape(batch, blocks)
    tables, starts = np.zeros((rows, width), np.int32), np.full((rows, width), FAR, np.int32)
    tables[:batch, :blocks], starts[:batch, :blocks] = ids, size * np.arange(blocks)
    positions, slots = np.full(rows, -1, np.int32), np.full(rows, runner.cache.num_blocks * size, np.int32)
    positions[:batch] = text - 1
    slots[:batch] = ids[:, (text - 1) // size] * size + (text - 1) % size
    tokens = np.random.default_rng(1).integers(0, llm.model_config.vocab_size, rows).astype(np.int32)
    arrays = StepArrays(tokens, positions, slots, tables, starts, np.arange(rows, dtype=np.int32))
    on_device = jax.device_put(arrays)
    program = runner.compile_step(shape)
    box = {"cache": runner.cache}

    def network(index: int):
        box["cache"], hidden = program(runner.params, box["cache"], on_device, runner._patterns)
        return runner.compile_sampler(hidden, on_device.last, None, None)(runner.params, hidden, on_device.last, None)

    def whole(index: int):
        return runner.execute(StepInput(shape, arrays)).tokens

    with context.guard(runner.implementation.name, FIRST_RUN, seconds=20):
        samplers = {"device": Dispatched(network, STEPS)}
    times, failed = rounds(samplers, count=5, left=lambda: context.left() - 2)
    runner.cache = box["cache"]
    more, failed_too = rounds({"runner": Dispatched(whole, STEPS)}, count=5, left=lambda: context.left() - 1)
    for key, error in (failed | failed_too).items():
        context.failed(f"{key} of {label}", error)
    weights = weight_bytes(runner.params)
    kv = batch * text * llm.model_config.kv_bytes_per_token(2)
    for key, t in (times | more).items():
        context.record("step", case=label, mode=key, weight_bytes=weights, kv_bytes=kv, **t.fields())
    if "device" in times:
        ms, moved = times["device"].median * 1e3, weights + kv
        context.value(f"step of {label}: device", ms, f"ms, {moved / 1e9:.1f} GB at {moved / ms / 1e9:.2f} TB/s",
                      bar=BAR_MS if batch == 1 else None)  # fmt: skip
    if "runner" in more:
        context.value(f"step of {label}: with the host", more["runner"].median * 1e3, "ms")
