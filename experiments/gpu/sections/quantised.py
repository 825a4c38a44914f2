"""Decode over keys and values of 8 and 4 bits against the same in bfloat16, for kernels that support `scales`.

`scales` is [M, L, 2, K, B] float32 next to a pool of codes, int8 or float8_e4m3fn: one for each token and kv head.
int4 uses those of `pallas_kernels.int4`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from experiments.gpu.candidates import Candidate, implementations, jax_bundled, ours
from experiments.gpu.cases import Arguments, Case, decode_cases
from experiments.gpu.context import Context
from experiments.gpu.race import Entry, race
from pallas_kernels import int4
from pallas_kernels.contract import Kernel

BAR = 0.6  # of the time with bfloat16, for int8
INT8, INT4 = "int8", "int4"
# (stages, workers) of the Hopper kernel that fit a multiprocessor of 132, next to the default of 2 stages and as many
# workers as `Plan.of` has.
TUNING = {INT8: ((2, 528), (3, 396)), "e4m3": ((3, 396),), INT4: ((3, 528),)}
KINDS = {INT8: jnp.int8, "e4m3": jnp.float8_e4m3fn, INT4: jnp.int4}


def quantised(pool: jax.Array, kind: str = INT8) -> tuple[jax.Array, jax.Array]:
    """Codes like the pool, and scales."""
    if kind == INT4:
        return int4.quantise(pool)
    dtype = KINDS[kind]
    largest = 127.0 if kind == INT8 else float(jnp.finfo(dtype).max)
    top = jnp.max(jnp.abs(pool), axis=-1).astype(jnp.float32)
    scales = jnp.maximum(top / largest, 1e-8)
    codes = pool.astype(jnp.float32) / scales[..., None]
    return (jnp.round(codes) if kind == INT8 else codes).astype(dtype), scales


def restored(a: Arguments, kind: str = INT8) -> Arguments:
    """Decodes the codes to bfloat16: kernels are compared with that, so quantisation loss does not count."""
    return a._replace(pool=_numbers(*quantised(a.pool, kind)).astype(a.pool.dtype))


def _numbers(codes: jax.Array, scales: jax.Array) -> jax.Array:
    if codes.dtype == jnp.int4:
        return int4.dequantise(codes, scales)
    return codes.astype(jnp.float32) * scales[..., None]


def _with_scales(name: str, kernel: Kernel, case: Case, kind: str) -> Candidate:
    def prepare(a: Arguments):
        pool, scales = quantised(a.pool, kind)
        return a.q, (pool, scales, *a[2:]), tuple(jnp.int32(layer) for layer in range(case.num_layers))

    def step(q, shared, layer):
        pool, scales, *rest = shared
        return kernel(Arguments(q, pool, *rest).call(layer=layer, scales=scales)).out

    of_token = case.head_dim * 9 // 16 if kind == INT4 else case.head_dim + 4  # with scales
    num_bytes = 2 * case.num_kv_heads * of_token * case.visible()
    return Candidate(
        f"{name}, {kind}",
        prepare,
        step,
        ours=True,
        layout=kind,
        seen=functools.partial(restored, kind=kind),
        bytes=num_bytes,
    )


def _supports_scales(kernel: Kernel, case: Case) -> bool:
    def call(a: Arguments):
        pool, scales = quantised(a.pool)
        return a._replace(pool=pool).call(scales=scales)

    return kernel.unsupported(jax.eval_shape(call, case.shapes())) is None


def _bundled(case: Case) -> Candidate:
    """jax's paged_attention with int8."""
    plain = jax_bundled(case, 3, 128)

    def prepare(a: Arguments):
        pool, scales = quantised(a.pool)
        heads_first = (1, 0, 2, 3)
        owns = tuple(
            tuple(pool[:, n, i].transpose(heads_first) for i in (0, 1))
            + tuple(scales[:, n, i].transpose(heads_first[:3]) for i in (0, 1))
            for n in range(case.num_layers)
        )
        return a.q[:, 0], plain.prepare(a)[1], owns

    def step(q, shared, own):
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        k, v, k_scales, v_scales = own
        splits = next(n for n in (16, 8, 4, 2, 1) if shared[0].shape[1] % n == 0)
        return paged_attention(
            q,
            k,
            v,
            *shared,
            k_scales,
            v_scales,
            k_splits=splits,
            num_stages=3,
            pages_per_compute_block=max(1, 128 // case.block_size),
        )

    return Candidate(
        "jax paged_attention, int8", prepare, step, plain.result, layout="int8, heads first", seen=restored
    )


def run(context: Context) -> None:
    on_gpu = jax.default_backend() == "gpu"
    cases = decode_cases(64, context.tiny)[:1]
    able = {n: k for n, k in implementations().items() if "prefill" not in n and _supports_scales(k, cases[0])}
    context.record("fact", name="quantised", implementations=sorted(able))
    entries = []
    for case in cases:
        coded = [_with_scales(n, kernel, case, kind) for n, kernel in able.items() for kind in KINDS]
        plain = [c for c in ours(case) if c.name in able]
        entries.append(Entry(case, [*plain, *coded, *([_bundled(case)] if on_gpu else [])]))
    measured = race(context, "quantised", entries)
    for case, who, mode in list(measured):
        plain, _, kind = who.rpartition(", ")
        if kind in KINDS and mode == "chained" and (case, plain, mode) in measured:
            ratio = measured[case, who, mode] / measured[case, plain, mode]
            bar = BAR if kind == INT8 else None
            context.value(f"{kind} against bfloat16, {case}, {plain}", ratio, "x the time", bar=bar)
    race(context, "quantised, tuning", [Entry(cases[0], list(_sweep(cases[0], able)))])


def _sweep(case: Case, able: dict[str, Kernel]) -> Iterator[Candidate]:
    """`hopper_decode` with each of TUNING's pairs; without a GPU the reference as often."""
    for kind, pairs in TUNING.items():
        for stages, workers in pairs:
            kernel = able.get("hopper_decode")
            kernel = kernel.tuned(stages=stages, num_workers=workers) if kernel else next(iter(able.values()))
            yield _with_scales(f"hopper, {stages} stages, {workers} workers", kernel, case, kind)
