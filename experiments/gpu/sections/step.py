"""A decode step of a model of Llama-8B's shape: on the device alone, with all that the host does, and taken apart."""

from __future__ import annotations

import functools
import time

from experiments.gpu.compiling import Compiling
from experiments.gpu.context import Context
from experiments.gpu.llama import LLAMA_8B, SMALL, filled, operators, random_params, weight_bytes
from experiments.gpu.step_parts import MeasuredStep, take_apart
from experiments.gpu.timing import Dispatched, measured

# Bar for one row: times its bytes at the copy bandwidth that `ceilings` measured. 4.65 ms on an H200.
BAR = 1.22
STEPS = 10
FIRST_RUN = "a step of Llama-8B's shape"


def run(context: Context) -> None:
    sizes = ((1, 64), (4, 32)) if context.tiny else ((1, 1024), (64, 2048), (256, 1024))
    chosen = operators(context, FIRST_RUN)
    llm = make_llm(SMALL if context.tiny else LLAMA_8B, sizes, block_size=16 if context.tiny else 64, operators=chosen)
    runner = llm.runner
    context.say(f"weights: {weight_bytes(runner.params) / 1e9:.2f} GB are read in a step")
    name = runner.implementation.name
    context.record(
        "fact", name="step", who=name, weight_bytes=weight_bytes(runner.params), pool_bytes=runner.cache.nbytes
    )
    done = {r["case"] for r in context.past("step")}  # before a restart
    steps = [MeasuredStep(llm, batch, text, f"{batch} rows of {text}, {name}") for batch, text in sizes]
    compiling, todo = Compiling(context), [s for s in steps if s.label not in done]
    for index, step in enumerate(todo):
        # The next one is lowered while this one is compiled.
        for some in todo[index : index + 2]:
            context.attempt(f"lowering the step of {some.label}", functools.partial(_submit, context, compiling, some))
        context.attempt(f"step of {step.label}", functools.partial(_time, context, compiling, step))
    middle = steps[1]
    if middle.key in runner.programs:
        take_apart(context, middle)


def make_llm(config, sizes, *, block_size: int, operators: dict[str, str] | None = None):
    """An engine whose pool holds the largest of some batches of texts, full of random numbers."""
    from ksana_jax.engine.llm import LLM

    longest, most = max(n for _, n in sizes), max(b for b, _ in sizes)
    num_blocks = max(batch * -(-text // block_size) for batch, text in sizes) + 8
    llm = LLM.from_params(
        config,
        random_params(config),
        dtype="bf16",
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=longest + block_size,
        max_num_seqs=most,
        max_num_batched_tokens=512,
        operators=operators,
    )
    llm.runner.cache = filled(llm.runner.cache)
    return llm


def _submit(context: Context, compiling: Compiling, step: MeasuredStep) -> None:
    if step.lowered is not None:
        return
    started, who = time.perf_counter(), step.runner.implementation.name
    with context.guard(who, FIRST_RUN, seconds=60):
        step.lowered = step.runner.lower(step.key)
    context.value(f"lowering the step of {step.label}", time.perf_counter() - started, "s")
    options = {"xla_dump_to": str(context.folder / "xla")}
    compiling.submit(step.label, step.lowered, who=who, case=FIRST_RUN, options=options)


def _time(context: Context, compiling: Compiling, step: MeasuredStep) -> None:
    started, runner = time.perf_counter(), step.runner
    while not compiling.done(step.label) and context.left() > 10:
        compiling.wait(0.05)
        time.sleep(0.01)
    program = compiling.result(step.label)
    context.value(f"waiting for the step of {step.label} to compile", time.perf_counter() - started, "s")
    runner._compiled[step.key] = program
    memory = program.memory_analysis()
    if memory is not None:
        context.record(
            "fact",
            name="memory of a step",
            rows=step.batch,
            aliased=memory.alias_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
            arguments=memory.argument_size_in_bytes,
        )
    who, pending = runner.implementation.name, compiling.pending
    with context.guard(who, FIRST_RUN, seconds=60):
        samplers = {"device": Dispatched(step.on_device(program), STEPS)}
    times, failed, readings = measured(context, samplers, count=5, spare_s=2)
    with context.guard(who, FIRST_RUN, seconds=60):
        samplers = {"runner": Dispatched(lambda i: runner.submit(step.input).result().tokens, STEPS)}
    more, failed_too, _ = measured(context, samplers, count=5)
    for key, error in (failed | failed_too).items():
        context.failed(f"{key} of {step.label}", error)
    for key, t in (times | more).items():
        context.record("step", case=step.label, mode=key, compiling=pending, **step.bytes(), **t.fields(), **readings)
    if "device" in times:
        ms, moved = times["device"].median * 1e3, sum(step.bytes().values())
        context.value(
            f"step of {step.label}: device",
            ms,
            f"ms, {moved / 1e9:.1f} GB at {moved / ms / 1e9:.2f} TB/s",
            bar=_bar_ms(context, moved) if step.batch == 1 else None,
        )
    if "runner" in more:
        context.value(f"step of {step.label}: with the host", more["runner"].median * 1e3, "ms")


def _bar_ms(context: Context, num_bytes: int) -> float | None:
    copies = [r["value"] for r in context.past("value", section="ceilings") if r["metric"] == "copy bandwidth"]
    return round(BAR * num_bytes / copies[-1] / 1e9, 2) if copies else None
