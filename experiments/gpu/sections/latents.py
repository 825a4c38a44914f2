"""Decode over latents (MLA), of 16 query heads, which memory limits, and of 128, which the tensor cores limit.

In bfloat16, and in 8 bits for kernels that read `contract.Pool.rotated`.
"""

from __future__ import annotations

import jax.numpy as jnp

from experiments.gpu import others
from experiments.gpu.candidates import Candidate, implementations, ours
from experiments.gpu.cases import Arguments, Case, latent_cases
from experiments.gpu.context import Context
from experiments.gpu.race import Entry, race
from ksana_jax.methods.codecs.latent import Latent8
from pallas_kernels.contract import Kernel, Pool

IN_8_BITS = ", 8 bits"


def _restored(a: Arguments) -> Arguments:
    """Decodes codes to bfloat16, which kernels multiply: quantisation loss does not count."""
    return a._replace(pool=Latent8().decode(Latent8().encode(a.pool, jnp), jnp).astype(a.pool.dtype))


def _in_8_bits(name: str, kernel: Kernel, case: Case) -> Candidate:
    def prepare(a: Arguments):
        leaves = Latent8().encode(a.pool, jnp)
        pool = Pool(leaves["kv"], leaves["scale"], rotated=leaves["rotated"])
        return a.q, (pool, *a[2:]), tuple(jnp.int32(layer) for layer in range(case.num_layers))

    def step(q, shared, layer):
        pool, *rest = shared
        return kernel(Arguments(q, pool.kv, *rest).call(layer=layer).replace(pool=pool)).out

    arrays = Latent8().arrays(case.head_dim).values()
    num_bytes = case.visible() * sum(size * jnp.dtype(dtype).itemsize for (size,), dtype in arrays)
    return Candidate(name + IN_8_BITS, prepare, step, ours=True, layout="8 bits", seen=_restored, bytes=num_bytes)


def run(context: Context) -> None:
    cases = {case.name: case for case in latent_cases(context.tiny)}
    kernels, entries = implementations(), []
    for case in cases.values():
        plain = ours(case)
        entries.append(Entry(case, [*plain, *(_in_8_bits(c.name, kernels[c.name], case) for c in plain)]))
    measured = race(context, "latents", entries, work=lambda case: {"bytes": case.bytes, "flops": case.flops})
    for (name, who, mode), seconds in measured.items():
        if mode == "chained":
            theirs, case = others.best("H200", f"latents, {name}", "us"), cases[name]
            num_bytes = next(
                c.bytes or case.bytes for e in entries if e.case is case for c in e.candidates if c.name == who
            )
            bar = theirs.value if theirs and not who.endswith(IN_8_BITS) else None
            context.value(f"latents, {name}, {who}", seconds * 1e6, "us", bar=bar)
            context.value(f"latents, {name}, {who}: bytes", num_bytes / seconds / 1e12, "TB/s")
            context.value(f"latents, {name}, {who}: products", case.flops / seconds / 1e12, "TFLOP/s")
