"""Writing a step's keys and values to the pool, with rope and scaling: one kernel against XLA's scatter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.candidates import relative_error
from experiments.gpu.compiling import compile_in_parallel
from experiments.gpu.context import Context
from experiments.gpu.timing import CHAIN, Chained, Sampler, chain, measured
from ksana_jax.ops.pool import KVCache
from pallas_kernels import kv_write_reference


def xla_flat(q, k, v, pool, slots, rope, *, layer):
    """What the engine does without a kernel: rotates, then scatters rows of a flat view of the pool."""
    q, k = (kv_write_reference._rotated(x.astype(jnp.float32), rope).astype(x.dtype) for x in (q, k))
    return kv_write_reference.Written(q, KVCache({"kv": pool}).write(layer, slots, k, v).kv, None, None)


def writers() -> dict[str, tuple[Callable[..., Any], bool]]:
    """(function, whether it is ours) by name."""
    found: dict[str, tuple[Callable[..., Any], bool]] = {
        "XLA scatter, flat": (xla_flat, False),
        "XLA scatter": (kv_write_reference.kv_write, False),
    }
    if jax.default_backend() == "gpu":
        from pallas_kernels.hopper.kv_write import kv_write

        for tokens in (1, 4):

            def ours(*args, tokens=tokens, **kwargs):
                return kv_write(*args, **kwargs, tokens_per_block=tokens)

            found[f"hopper, {tokens} tokens a block"] = (ours, True)
    return found


def run(context: Context) -> None:
    for num_tokens in (16,) if context.tiny else (8192, 64):
        context.attempt(f"{num_tokens} tokens", lambda n=num_tokens: _time(context, n))


def _time(context: Context, num_tokens: int) -> None:
    heads, kv_heads, width, layers, size = (4, 2, 64, 2, 16) if context.tiny else (32, 8, 128, 8, 64)
    case, num_blocks = f"{num_tokens} tokens", max(2 * num_tokens // size, 4)
    calls = 3 if context.tiny else CHAIN
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    q, k, v = normal(num_tokens, heads, width), normal(num_tokens, kv_heads, width), normal(num_tokens, kv_heads, width)
    pool = normal(num_blocks, layers, 2, kv_heads, size, width)
    slots = jnp.asarray(np.random.default_rng(0).permutation(num_blocks * size)[:num_tokens].astype(np.int32))
    angles = jax.random.uniform(next(keys), (num_tokens, width // 2)) * 100
    shared = (k, v, slots, (jnp.cos(angles), jnp.sin(angles)))
    owns = tuple(jnp.int32(layer) for layer in range(layers))
    # Least bytes: queries read and written, keys and values read and written.
    work = {"bytes": 2 * (q.nbytes + k.nbytes + v.nbytes)}

    def step_of(write: Callable[..., Any]):
        def step(carry, shared, layer):
            (q, pool), (k, v, slots, rope) = carry, shared
            out = write(q, k, v, pool, slots, rope, layer=layer)
            return out.q, out.pool

        return step

    lowered = []
    for name, (write, _) in writers().items():
        if context.excluded(name, case):
            continue
        try:
            step = step_of(write)
            with context.guard(name, case, seconds=60):
                lowered.append(((name, 1), jax.jit(step, donate_argnums=0).lower((q, pool), shared, owns[0])))
                lowered.append(((name, calls), chain(step, calls).lower((q, pool), shared, owns)))
        except Exception as error:
            context.failed(f"{name} on {case}", error, who=name, case=case)
    programs = compile_in_parallel(
        context, lowered, timeout_s=max(context.left() - 8, 1), case=case, who=lambda key: key[0]
    )
    right = jax.block_until_ready(jax.jit(step_of(kv_write_reference.kv_write))((q, pool), shared, owns[0]))
    samplers: dict[str, Sampler] = {}
    verdicts: dict[str, bool] = {}
    for name, (_, is_ours) in writers().items():
        if (name, calls) not in programs:
            continue
        try:
            for program in (programs[name, 1], programs[name, calls]):
                if isinstance(program, Exception):
                    raise program
            with context.guard(name, case):
                out = jax.block_until_ready(programs[name, 1]((jnp.copy(q), jnp.copy(pool)), shared, owns[0]))
            # All of the pool: what was not to be written must be as it was.
            error = max(relative_error(x, y) for x, y in zip(out, right))
            verdicts[name] = error <= 4e-3  # rounded once to 8 bits, perhaps to the other side
            context.record(
                "check",
                metric="kv write",
                case=case,
                who=name,
                ours=is_ours,
                error=error,
                tolerance=4e-3,
                right=verdicts[name],
            )
            memory = programs[name, 1].memory_analysis()
            if memory is not None:
                context.record(
                    "fact",
                    name="memory of a write",
                    who=name,
                    aliased=memory.alias_size_in_bytes,
                    temporary=memory.temp_size_in_bytes,
                    pool=pool.nbytes,
                )
            with context.guard(name, case):
                carry = (jnp.copy(q), jnp.copy(pool))
                samplers[name] = Chained(programs[name, calls], carry, shared, owns, calls)
        except Exception as error:
            context.failed(f"{name} on {case}", error, who=name, case=case)
    times, failed, readings = measured(context, samplers, count=3 if context.tiny else 6)
    for name, error in failed.items():
        context.failed(f"{name} on {case}", error, who=name, case=case)
    for name, t in times.items():
        context.record(
            "time",
            metric="kv write",
            case=case,
            who=name,
            ours=writers()[name][1],
            mode="chained",
            right=verdicts.get(name),
            **t.fields(),
            **readings,
            **work,
        )
        context.say(f"{name} on {case}: {t.median * 1e6:.1f} us, {work['bytes'] / t.median / 1e12:.2f} TB/s")
