"""One decode step, ready to run, and what it is made of: sampling, command buffers, the network alone, its kernels."""

from __future__ import annotations

import functools
import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.compiling import COMPILE_S
from experiments.gpu.context import Context
from experiments.gpu.llama import weight_bytes
from experiments.gpu.timing import Dispatched, measured

STEPS = 10
PROFILED = 3


class MeasuredStep:
    """A decode step of `batch` rows with texts of `text` tokens, in blocks anywhere in the pool.

    Attributes:
      lowered: its program, once it was lowered.
    """

    def __init__(self, llm, batch: int, text: int, label: str):
        from ksana_jax.core.patterns import FAR
        from ksana_jax.runner.decode_loop import LoopKey
        from ksana_jax.scheduler.step.types import StepArrays, StepInput

        self.llm, self.runner, self.batch, self.text, self.label = llm, llm.runner, batch, text, label
        self.lowered: Any = None
        size, blocks = llm.config.block_size, -(-text // llm.config.block_size)
        self.shape = shape = llm.engine.builder.buckets.shape(batch, (), blocks)
        rows, width, num_blocks = shape.num_tokens, shape.table_width, self.runner.cache.num_blocks
        ids = np.random.default_rng(0).permutation(num_blocks)[: batch * blocks].reshape(batch, blocks)
        tables, starts = np.zeros((rows, width), np.int32), np.full((rows, width), FAR, np.int32)
        tables[:batch, :blocks], starts[:batch, :blocks] = ids, size * np.arange(blocks)
        positions, slots = np.full(rows, -1, np.int32), np.full(rows, num_blocks * size, np.int32)
        positions[:batch] = text - 1
        slots[:batch] = ids[:, (text - 1) // size] * size + (text - 1) % size
        tokens = np.random.default_rng(1).integers(0, llm.model_config.vocab_size, rows).astype(np.int32)
        sampled = np.minimum(np.arange(shape.max_sampled, dtype=np.int32), rows - 1)
        arrays = StepArrays(tokens, positions, positions[None], slots[None], tables[None], starts[None], sampled)
        self.input = StepInput(shape, arrays, num_sampled=rows)
        # The step and the argmax over its tokens, on a GPU one program.
        self.key = LoopKey(shape, 1, False, None)

    def bytes(self) -> dict[str, int]:
        """Least bytes of a step."""
        kv = self.batch * self.text * self.runner.layout.token_bytes
        return {"weight_bytes": weight_bytes(self.runner.params), "kv_bytes": kv}

    def on_device(self, program: Callable[..., Any], settings: Any = None) -> Callable[[int], Any]:
        """A call that runs the step and chooses tokens, all arrays being on the device.

        Args:
          program: of `key`, or of one with sampling settings. settings: `SamplingArrays`; None has none.
        """
        runner, vector = self.runner, self.runner.packed(self.shape, self.input.arrays, settings)
        vectors, previous = jax.device_put((vector[None], np.zeros(self.shape.max_sampled, np.int32)))

        def call(index: int):
            runner.cache, tokens, reports, _ = program(
                runner.params, runner.cache, vectors, previous, runner._patterns.arrays, None
            )
            return tokens, reports

        return call

    def sampling(self) -> Callable[[int], Any]:
        """A call as of `on_device` that samples at temperature 1, without top-k, top-p and penalties."""
        self.runner.compile([key := self.key._replace(samples=True)])
        return self.on_device(self.runner.programs[key], self._settings())

    def _settings(self):
        from ksana_jax.scheduler.step.types import SamplingArrays

        rows = self.shape.max_sampled
        ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
        ints = np.zeros(rows, np.int32)
        seeds = np.random.default_rng(2).integers(0, 2**32, (rows, 2), dtype=np.uint32)
        return SamplingArrays(ones, ints, ones, zeros, seeds, ints, ones, zeros, zeros, ints - 1)


def take_apart(context: Context, step: MeasuredStep) -> None:
    """Times a step in other ways and looks into its program; each way that fails costs only itself."""
    program = step.runner.programs[step.key]
    with gzip.open(context.out / "step_after_optimizations.txt.gz", "wt") as file:
        file.write(program.as_text())
    context.attempt("the step's launches", lambda: _launches(context, step))
    ways: dict[str, Callable[[], Callable[[int], Any]]] = {
        "without attention and cache": lambda: network_alone(step),
        "sampling at temperature 1": step.sampling,
        "without command buffers": lambda: step.on_device(_without_command_buffers(step)),
    }
    who = step.runner.implementation.name
    for name, make in ways.items():
        if context.left() > 5 and not context.excluded(who, name):
            context.attempt(f"step {name}", functools.partial(_time, context, step, name, make))
    if context.left() > 5 and not context.excluded(who, "profile"):
        with context.guard(who, "profile", seconds=30):
            context.attempt("profile of a step", lambda: _profile(context, step, step.on_device(program)))


def _time(context: Context, step: MeasuredStep, name: str, make: Callable[[], Callable[[int], Any]]) -> None:
    with context.guard(step.runner.implementation.name, name, seconds=COMPILE_S):
        sampler = Dispatched(make(), STEPS)
    times, failed, readings = measured(context, {name: sampler}, count=5)
    for error in failed.values():
        raise error
    context.record("step", case=step.label, mode=name, **step.bytes(), **times[name].fields(), **readings)
    context.value(f"step of {step.label}: {name}", times[name].median * 1e3, "ms")


def network_alone(step: MeasuredStep) -> Callable[[int], Any]:
    """The network without attention and cache, and the most probable tokens: matrix products and what XLA fuses."""
    from ksana_jax.models.transformer import forward, logits

    config, params, tokens = step.runner.config, step.runner.params, jax.device_put(step.input.arrays.tokens)
    operators = step.runner.operators

    def attend(layer, q, k, v, state):
        return _with_all(q, k, v), state

    def run(params, tokens):
        hidden, _ = forward(params, tokens, attend, None, config=config, operators=operators)
        return jnp.argmax(logits(params, hidden, config=config, linear=operators.linear), axis=-1)

    compiled = jax.jit(run).lower(params, tokens).compile()
    return lambda index: compiled(params, tokens)


def _with_all(q, k, v):
    """q, and a little of k and v, whose products would be left out otherwise."""
    group = q.shape[-2] // k.shape[-2]
    return q + 1e-3 * jnp.repeat(k + v, group, axis=-2)


def _without_command_buffers(step: MeasuredStep):
    lowered = step.lowered if step.lowered is not None else step.runner.lower(step.key)
    on_gpu = step.runner.platform == "gpu"
    return lowered.compile(compiler_options={"xla_gpu_enable_command_buffer": ""} if on_gpu else None)


def _launches(context: Context, step: MeasuredStep) -> None:
    """The compiler's list of launches of the step, as a file and counted."""
    from tests.kernel_report.report import count_thunks

    files = sorted((context.folder / "xla").glob("*thunk_sequence_after_thunk_passes.txt"))
    texts = [f.read_text(errors="replace") for f in files]
    if not texts:
        context.record("fact", name="launches of a step", note="XLA wrote no lists of launches (it does for GPUs)")
        return
    # One for each step that was compiled, in that order.
    text = texts[min(1, len(texts) - 1)]
    (context.out / "step_launches.txt").write_text(text)
    inside, outside = count_thunks(text)
    context.record("fact", name="launches of a step", case=step.label, inside=inside, outside=outside)


def _profile(context: Context, step: MeasuredStep, call: Callable[[int], Any]) -> None:
    folder = context.folder / "profile"
    jax.block_until_ready(call(0))
    with jax.profiler.trace(str(folder)):
        for index in range(PROFILED):
            jax.block_until_ready(call(index))
    sums, counts = kernel_sums(max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime))
    lines = [f"{sums[n] / PROFILED:12.1f} us  {counts[n] / PROFILED:8.1f} times  {n}" for n, _ in sums.most_common()]
    (context.out / "step_kernels.txt").write_text("\n".join([f"a step of {step.label}", *lines, ""]))
    total = sum(sums.values()) / PROFILED / 1e3
    top = {name: round(us / PROFILED, 1) for name, us in sums.most_common(20)}
    context.record("fact", name="kernels of a step", case=step.label, us=top)
    launches = sum(counts.values()) // PROFILED
    context.value(f"step of {step.label}: sum of its kernels", total, f"ms in {launches} launches")


def kernel_sums(path: Path) -> tuple[Counter, Counter]:
    """Microseconds and numbers of events by name in a profile: of the GPU's streams, else of the host."""
    data = jax.profiler.ProfileData.from_file(str(path))
    planes = list(data.planes)
    lines = [line for p in planes if "GPU" in p.name for line in p.lines if line.name.startswith("Stream")]
    lines = lines or [line for p in planes if "CPU" in p.name for line in p.lines]
    sums, counts = Counter(), Counter()
    for line in lines:
        for event in line.events:
            sums[event.name] += event.duration_ns * 1e-3
            counts[event.name] += 1
    return sums, counts
