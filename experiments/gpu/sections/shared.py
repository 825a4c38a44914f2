"""64 rows that share a prefix of 8k: its blocks read once and merged by log-sum-exp, against each row for itself."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from experiments.gpu.candidates import Candidate, implementations, ours
from experiments.gpu.cases import Arguments, Case
from experiments.gpu.context import Context
from experiments.gpu.race import Entry, race
from pallas_kernels.contract import Kernel

BAR = 5.0


def together(case: Case, name: str, kernel: Kernel) -> Candidate:
    """All rows' queries as one tile over the shared blocks, each row's own blocks after that."""
    count = case.shared // case.block_size

    def prepare(a: Arguments):
        own = (a.tables[:, count:], a.starts[:, count:], a.positions)
        # One tile of as many queries as there are rows, with the first row's table.
        shared = (a.tables[:1, :count], a.starts[:1, :count], a.positions.reshape(1, -1))
        return a.q, (a.pool, shared, own), tuple(jnp.int32(layer) for layer in range(case.num_layers))

    def step(q, arrays, layer):
        pool, shared, own = arrays
        merged = dict(layer=layer, return_lse=True, out_dtype=jnp.float32)
        a = kernel(Arguments(q.reshape(1, -1, *q.shape[2:]), pool, *shared).call(**merged))
        b = kernel(Arguments(q, pool, *own).call(**merged))
        assert a.lse is not None and b.lse is not None
        out_a, lse_a, out_b, lse_b = a.out.reshape(q.shape), a.lse.reshape(q.shape[:3]), b.out, b.lse
        top = jnp.maximum(lse_a, lse_b)
        weight_a, weight_b = jnp.exp(lse_a - top)[..., None], jnp.exp(lse_b - top)[..., None]
        return ((out_a * weight_a + out_b * weight_b) / (weight_a + weight_b)).astype(q.dtype)

    return Candidate(f"{name}, shared blocks once", prepare, step, ours=True)


def run(context: Context) -> None:
    rows, prefix, own = (4, 128, 40) if context.tiny else (64, 8192, 256)
    shared = Case(f"{rows} rows share {prefix}, {own} of their own", (prefix + own,) * rows, 64, shared=prefix)
    if context.tiny:
        shared = dataclasses.replace(shared, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, tiny=True)
    apart = dataclasses.replace(shared, name=f"{rows} rows of {prefix + own}, nothing shared", shared=0)
    # In between: the same blocks in all tables, each row reading them for itself, much of it from the L2.
    entries = [
        Entry(shared, [*(together(shared, n, f) for n, f in implementations().items()), *ours(shared)]),
        Entry(apart, ours(apart)),
    ]
    measured = race(
        context,
        "shared prefix",
        entries,
        work=lambda case: {"bytes": case.bytes - 4 * case.num_kv_heads * case.head_dim * case.shared * (rows - 1)},
    )
    for name in implementations():
        once = measured.get((shared.name, f"{name}, shared blocks once", "chained"))
        each = measured.get((apart.name, name, "chained"))
        if once and each:
            context.value(
                f"shared prefix: {shared.name}, {name}", each / once, "x faster than unshared", bar=BAR, most=False
            )
