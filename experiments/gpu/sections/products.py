"""A layer without its attention, with few rows: products that take norm, activation and residual along, and XLA's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpu.candidates import relative_error
from experiments.gpu.compiling import compile_in_parallel
from experiments.gpu.context import Context
from experiments.gpu.llama import LLAMA_8B, SMALL, random_params
from experiments.gpu.timing import CHAIN, Chained, Sampler, chain, measured
from ksana_jax.core.layer_spec import LayerSpec
from ksana_jax.models.joined import joined
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import LayerParams
from pallas_kernels.contract import Kernel, Product

# Each rounds its results to 8 bits, and the last ones depend on all before.
TOLERANCE = 2e-2
LAYERS = 4  # together 1.7 GB
ROWS = (8, 64, 16, 32)
PARTS = ("qkv", "output", "gate and up", "down")
# For these rows also each product alone in the kernel, and the other three in XLA.
ROWS_BY_PART = (8, 64)


def part_of(call: Product) -> str:
    """Names the product of a layer."""
    if call.activation is not None:
        return "gate and up"
    if call.residual is None:
        return "qkv"
    return "down" if call.x.shape[1] > call.residual.shape[1] else "output"


def candidates(rows: int) -> dict[str, tuple[Operators, bool]]:
    """(operators, whether they are ours) by name, for a number of rows."""
    found: dict[str, tuple[Operators, bool]] = {"XLA": (Operators(), False)}
    if jax.default_backend() == "gpu":
        from ksana_jax.ops.fused_products import KERNEL, FusedOperators

        def without_ahead(call: Product, work: None, *, tuning: None) -> jax.Array:
            return KERNEL(dataclasses.replace(call, ahead=None))

        def only(part: str):
            return FusedOperators(serves=lambda call: part_of(call) == part)

        found["hopper, where it pays"] = FusedOperators(), True
        found["hopper, all four"] = FusedOperators(serves=lambda call: True), True
        found["hopper, nothing asked for ahead"] = FusedOperators(kernel=Kernel(without_ahead, None)), True
        if rows in ROWS_BY_PART:
            found |= {f"hopper, {part} alone": (only(part), True) for part in PARTS}
    return found


def run(context: Context) -> None:
    config = dataclasses.replace(SMALL if context.tiny else LLAMA_8B, num_layers=LAYERS, vocab_size=256)
    layers = joined(random_params(config), config, consume=True).layers
    for rows in (8,) if context.tiny else ROWS:
        context.attempt(f"{rows} rows", lambda n=rows: _time(context, n, config.layers[0], layers))


def _step_of(operators: Operators, spec: LayerSpec) -> Callable[[Any, Any, Any], Any]:
    """A layer whose attention returns the queries."""

    def step(x: jax.Array, shared: None, own: tuple[LayerParams, LayerParams]) -> jax.Array:
        p, following = own
        q, _, _ = operators.queries_keys_values(x, p, spec)
        return operators.after_attention(x, q, p, spec, following)

    return step


def _time(context: Context, rows: int, spec: LayerSpec, layers: tuple[LayerParams, ...]) -> None:
    case, calls = f"{rows} rows", 3 if context.tiny else CHAIN
    x = jax.random.normal(jax.random.key(rows), (rows, layers[0].w_o.shape[0]), jnp.bfloat16)
    owns = tuple(zip(layers, (*layers[1:], layers[0])))
    tried, lowered = candidates(rows), []
    for name, (operators, _) in tried.items():
        if not context.excluded(name, case):
            step = _step_of(operators, spec)
            lowered.append(((name, 1), jax.jit(step).lower(x, None, owns[0])))
            lowered.append(((name, calls), chain(step, calls).lower(x, None, owns)))
    timeout_s = max(min(context.left() - 8, 40), 1)
    programs = compile_in_parallel(context, lowered, timeout_s=timeout_s, case=case, who=lambda key: key[0])
    exact = jax.tree.map(lambda w: w.astype(jnp.float32), owns[0])
    right = jax.jit(_step_of(Operators(), spec))(x.astype(jnp.float32), None, exact)
    samplers: dict[str, Sampler] = {}
    verdicts: dict[str, bool] = {}
    for name, (_, is_ours) in tried.items():
        try:
            one, chained = programs[name, 1], programs[name, calls]
            for program in (one, chained):
                if isinstance(program, Exception):
                    raise program
            with context.guard(name, case):
                error = relative_error(jax.block_until_ready(one(x, None, owns[0])), right)
            verdicts[name] = error <= TOLERANCE
            verdict = {"error": error, "tolerance": TOLERANCE, "right": verdicts[name]}
            context.record("check", metric="products", case=case, who=name, ours=is_ours, **verdict)
            with context.guard(name, case):
                samplers[name] = Chained(chained, jnp.copy(x), None, owns, calls)
        except Exception as error:
            context.failed(f"{name} on {case}", error, who=name, case=case)
    times, failed, readings = measured(context, samplers, count=3 if context.tiny else 6)
    for name, error in failed.items():
        context.failed(f"{name} on {case}", error, who=name, case=case)
    nbytes = sum(w.nbytes for w in jax.tree.leaves(layers[0]))
    for name, t in times.items():
        context.record(
            "time",
            metric="products",
            case=case,
            who=name,
            ours=tried[name][1],
            mode="chained",
            right=verdicts.get(name),
            **t.fields(),
            **readings,
            bytes=nbytes,
        )
        context.say(f"{name} on {case}: {t.median * 1e6:.1f} us, {nbytes / t.median / 1e12:.2f} TB/s")
