"""Writes of keys and values and products of few rows against their references, before any section times them."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.candidates import relative_error
from experiments.gpu.compiling import compile_in_parallel
from experiments.gpu.context import Context
from experiments.gpu.race import TOLERANCE
from experiments.gpu.sections.correctness import same
from pallas_kernels import kv_write_reference, product_reference
from pallas_kernels.contract import Kernel, Pool, Product, Write, Written


class _Case(NamedTuple):
    """One call of a kernel and what it must equal. who: the kernel's name."""

    name: str
    who: str
    kernel: Kernel
    reference: Kernel
    call: Any


def kernels() -> tuple[Kernel[Written], Kernel[jax.Array]]:
    """Ours, of writes and of products; on a machine without a GPU the references stand in."""
    if jax.default_backend() == "gpu":
        from pallas_kernels.registry import KV_WRITES, PRODUCTS

        return KV_WRITES["hopper_kv_write"], PRODUCTS["hopper_product"]
    return kv_write_reference.KERNEL, product_reference.KERNEL


def run(context: Context) -> None:
    seed = time.time_ns() % 2**20
    context.record("fact", name="seeds", first=seed)
    rng = np.random.default_rng(seed)
    cases = [c for c in [*_writes(rng, context.tiny), *_products(seed, context.tiny)] if not _is_done(context, c)]
    lowered = []
    for case in cases:
        try:
            with context.guard(case.who, case.name, seconds=60):
                lowered.append((case.name, jax.jit(lambda call, kernel=case.kernel: kernel(call)).lower(case.call)))
        except Exception as error:
            context.failed(f"{case.who} on {case.name}", error, who=case.who, case=case.name)
    timeout_s = max(context.left() - 8, 1)
    programs = compile_in_parallel(context, lowered, timeout_s=timeout_s, case="all", who=lambda name: name)
    for case in cases:
        if case.name in programs:
            try:
                _check(context, case, programs[case.name])
            except Exception as error:
                context.failed(f"{case.who} on {case.name}", error, who=case.who, case=case.name)


def _is_done(context: Context, case: _Case) -> bool:
    done = {r["case"] for r in context.past("check", "failed") if "case" in r}  # before a restart
    return case.name in done or context.excluded(case.who, case.name)


def _check(context: Context, case: _Case, program: Any) -> None:
    if isinstance(program, Exception):
        raise program
    with context.guard(case.who, case.name):
        out, again = (jax.block_until_ready(program(case.call)) for _ in range(2))
    right = jax.jit(lambda call: case.reference(call))(case.call)
    # All of a pool: what was not to be written must be as it was.
    errors = [relative_error(a, b) for a, b in zip(_numbers(out), _numbers(right), strict=True)]
    found = {"error": max(errors), "errors": errors, "tolerance": TOLERANCE, "repeatable": same(out, again)}
    found["right"] = found["error"] <= TOLERANCE and found["repeatable"]
    context.record("check", metric="operators", case=case.name, who=case.who, ours=True, **found)
    context.say(f"{case.who} on {case.name}: {'right' if found['right'] else f'WRONG: {found}'}")


def _numbers(out: Any) -> list[jax.Array]:
    """The arrays of a result, codes of a pool multiplied with their scales."""
    if isinstance(out, jax.Array):
        return [out]
    kv, scales, *_ = out.pool
    kv = kv if scales is None else kv.astype(jnp.float32) * scales[..., None]
    return [out.q, kv, *([] if out.q_sink is None else [out.q_sink])]


def _writes(rng: np.random.Generator, tiny: bool) -> list[_Case]:
    kernel, _ = kernels()
    heads, num_tokens = ((4, 2, 64), 5) if tiny else ((32, 8, 128), 130)
    found = []
    for dtype, norms in (("bfloat16", False), ("int8", True), ("float8_e4m3fn", False)):
        name = f"write of {num_tokens} tokens, {dtype}{', norms' * norms}"
        call = _write(rng, heads, num_tokens, dtype, norms)
        found.append(_Case(name, "hopper_kv_write", kernel, kv_write_reference.KERNEL, call))
    return found


def _write(rng: np.random.Generator, heads: tuple[int, int, int], num_tokens: int, dtype: str, norms: bool) -> Write:
    """A write to layer 1 of a pool of numbers; every seventh slot is outside of it."""
    (n, k, h), size = heads, 64
    num_blocks = 2 * num_tokens // size + 2

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    shape = (num_blocks, 2, 2, k, size, h)
    scales = None if dtype == "bfloat16" else jnp.asarray(rng.uniform(0.01, 0.02, shape[:-1]), jnp.float32)
    kv = draw(*shape) if scales is None else jnp.asarray(rng.integers(-100, 100, shape), dtype)
    slots = rng.permutation(num_blocks * size)[:num_tokens].astype(np.int32)
    slots[::7] = num_blocks * size
    angles = rng.uniform(0, 100, (num_tokens, h // 2))
    return Write(
        draw(num_tokens, n, h),
        draw(num_tokens, k, h),
        draw(num_tokens, k, h),
        Pool(kv, scales),
        jnp.asarray(slots),
        (jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)),
        layer=jnp.int32(1),
        q_norm=1 + draw(h) / 4 if norms else None,
        k_norm=1 + draw(h) / 4 if norms else None,
        q_scale=h**-0.5,
    )


def _products(seed: int, tiny: bool) -> list[_Case]:
    """The four products of a layer of Llama-8B with 8 and with 64 rows."""
    _, kernel = kernels()
    return [
        _Case(f"{name}, {rows} rows", "hopper_product", kernel, product_reference.KERNEL, call)
        for rows in ((8,) if tiny else (8, 64))
        for name, call in llama_products(seed + rows, tiny, rows).items()
    ]


def llama_products(seed: int, tiny: bool, rows: int) -> dict[str, Product]:
    """The calls of the four products of a layer of Llama-8B, with random numbers."""
    depth, qkv, wide = (256, 384, 512) if tiny else (4096, 6144, 14_336)
    keys = iter(jax.random.split(jax.random.key(seed), 20))

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape, jnp.bfloat16)

    def weight(width: int, of: int) -> jax.Array:
        return draw(width, of, scale=of**-0.5)

    norm = 1 + draw(depth) / 4
    gate_up = weight(2 * wide, depth)
    x, gated = draw(rows, depth), draw(rows, wide)
    return {
        "qkv": Product(x, weight(qkv, depth), norm=norm, bias=draw(qkv)),
        "output": Product(x, weight(depth, depth), residual=draw(rows, depth), ahead=gate_up, ahead_bytes=1 << 20),
        "gate and up": Product(x, gate_up, norm=norm, activation="silu"),
        "down": Product(gated, weight(depth, wide), residual=draw(rows, depth)),
    }
