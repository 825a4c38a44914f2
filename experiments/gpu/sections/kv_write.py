"""Writing a step's keys and values to the pool, with rope and scaling: one kernel against XLA's scatter.

Queries, keys and values are slices of one array, as in an engine's product. From three arrays the kernel's
program first makes one: on an H200 that took half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.candidates import relative_error
from experiments.gpu.compiling import compile_in_parallel
from experiments.gpu.context import Context
from experiments.gpu.timing import CHAIN, Chained, Sampler, chain, measured
from ksana_jax.ops.pool import KVCache
from pallas_kernels import kv_write_reference
from pallas_kernels.contract import Kernel, Pool, Write, Written

TOLERANCE = 4e-3  # rounded once to 8 bits, perhaps to the other side


def xla_flat(call: Write, work: None = None, *, tuning: None = None) -> Written:
    """The engine's write without a kernel: rotates, then scatters rows of a flat view of the pool."""
    q, k = (kv_write_reference.rotated(x.astype(jnp.float32), call.rope).astype(x.dtype) for x in (call.q, call.k))
    return Written(q, Pool(KVCache({"kv": call.pool.kv}, "bf16").write(call.layer, call.slots, k, call.v).kv))


def writers() -> dict[str, tuple[Kernel[Written], bool]]:
    """(kernel, whether it is ours) by name."""
    found: dict[str, tuple[Kernel[Written], bool]] = {
        "XLA scatter, flat": (Kernel(xla_flat, None), False),
        "XLA scatter": (kv_write_reference.KERNEL, False),
    }
    if jax.default_backend() == "gpu":
        from pallas_kernels.registry import KV_WRITES

        for tokens in (1, 4):
            kernel = KV_WRITES["hopper_kv_write"].tuned(tokens_per_block=tokens)
            found[f"hopper, {tokens} tokens a block"] = (kernel, True)
    return found


def run(context: Context) -> None:
    for num_tokens in (16,) if context.tiny else (8192, 64):
        context.attempt(f"{num_tokens} tokens", lambda n=num_tokens: _time(context, _case(context, n)))


class _Case(NamedTuple):
    """A write. carry: rotated queries and pool, which each call hands to the next one; shared: its other arrays.

    owns: the layers that successive calls write. calls: of a chain. nbytes: minimum read and written.
    """

    name: str
    carry: Any
    shared: Any
    owns: tuple[jax.Array, ...]
    calls: int
    nbytes: int


def _case(context: Context, num_tokens: int) -> _Case:
    heads, kv_heads, width, layers, size = (4, 2, 64, 2, 16) if context.tiny else (32, 8, 128, 8, 64)
    num_blocks = max(2 * num_tokens // size, 4)
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    qkv = normal(num_tokens, heads + 2 * kv_heads, width)
    pool = normal(num_blocks, layers, 2, kv_heads, size, width)
    slots = jnp.asarray(np.random.default_rng(0).permutation(num_blocks * size)[:num_tokens].astype(np.int32))
    angles = jax.random.uniform(next(keys), (num_tokens, width // 2)) * 100
    return _Case(
        f"{num_tokens} tokens",
        (qkv[:, :heads], pool),
        (qkv, slots, (jnp.cos(angles), jnp.sin(angles))),
        tuple(jnp.int32(layer) for layer in range(layers)),
        calls=3 if context.tiny else CHAIN,
        # Queries, keys and values, each read and written.
        nbytes=2 * qkv.nbytes,
    )


def _step_of(kernel: Kernel[Written], is_ours: bool) -> Callable[..., Any]:
    """XLA's writers rotate the queries of the call before: those that nothing read, XLA would not rotate."""

    def step(carry, shared, layer):
        (last_q, pool), (qkv, slots, rope) = carry, shared
        num_heads, num_kv_heads = last_q.shape[1], pool.shape[3]
        q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
        out = kernel(Write(q if is_ours else last_q, k, v, Pool(pool), slots, rope, layer=layer))
        return out.q, out.pool.kv

    return step


def _compile(context: Context, case: _Case) -> dict[tuple[str, int], Any]:
    """Programs of one call and of a chain of calls, or why there is none, by (name, calls)."""
    lowered = []
    for name, (kernel, is_ours) in writers().items():
        if context.excluded(name, case.name):
            continue
        try:
            step = _step_of(kernel, is_ours)
            with context.guard(name, case.name, seconds=60):
                one = jax.jit(step, donate_argnums=0).lower(case.carry, case.shared, case.owns[0])
                lowered.append(((name, 1), one))
                lowered.append(((name, case.calls), chain(step, case.calls).lower(case.carry, case.shared, case.owns)))
        except Exception as error:
            context.failed(f"{name} on {case.name}", error, who=name, case=case.name)
    timeout_s = max(context.left() - 8, 1)
    return compile_in_parallel(context, lowered, timeout_s=timeout_s, case=case.name, who=lambda key: key[0])


def _check(context: Context, case: _Case, name: str, is_ours: bool, program: Any, right: Any) -> bool:
    """True if one call of a program gives the reference's queries and pool; also records its memory."""
    with context.guard(name, case.name):
        out = jax.block_until_ready(program(jax.tree.map(jnp.copy, case.carry), case.shared, case.owns[0]))
    # All of the pool: what was not to be written must be as it was.
    error = max(relative_error(x, y) for x, y in zip(out, right))
    verdict = {"error": error, "tolerance": TOLERANCE, "right": error <= TOLERANCE}
    context.record("check", metric="kv write", case=case.name, who=name, ours=is_ours, **verdict)
    memory = program.memory_analysis()
    if memory is not None:
        context.record(
            "fact",
            name="memory of a write",
            who=name,
            aliased=memory.alias_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
            pool=case.carry[1].nbytes,
        )
    return error <= TOLERANCE


def _time(context: Context, case: _Case) -> None:
    programs = _compile(context, case)
    reference = jax.jit(_step_of(kv_write_reference.KERNEL, is_ours=False))
    right = jax.block_until_ready(reference(case.carry, case.shared, case.owns[0]))
    samplers: dict[str, Sampler] = {}
    verdicts: dict[str, bool] = {}
    for name, (_, is_ours) in writers().items():
        if (name, case.calls) not in programs:
            continue
        try:
            one, chained = programs[name, 1], programs[name, case.calls]
            for program in (one, chained):
                if isinstance(program, Exception):
                    raise program
            verdicts[name] = _check(context, case, name, is_ours, one, right)
            with context.guard(name, case.name):
                carry = jax.tree.map(jnp.copy, case.carry)
                samplers[name] = Chained(chained, carry, case.shared, case.owns, case.calls)
        except Exception as error:
            context.failed(f"{name} on {case.name}", error, who=name, case=case.name)
    times, failed, readings = measured(context, samplers, count=3 if context.tiny else 6)
    for name, error in failed.items():
        context.failed(f"{name} on {case.name}", error, who=name, case=case.name)
    for name, t in times.items():
        context.record(
            "time",
            metric="kv write",
            case=case.name,
            who=name,
            ours=writers()[name][1],
            mode="chained",
            right=verdicts.get(name),
            **t.fields(),
            **readings,
            bytes=case.nbytes,
        )
        context.say(f"{name} on {case.name}: {t.median * 1e6:.1f} us, {case.nbytes / t.median / 1e12:.2f} TB/s")
