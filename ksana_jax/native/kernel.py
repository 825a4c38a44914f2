"""The kernel `native`: the contract of `pallas_kernels.contract` on a CPU, as a custom call into C++."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from ksana_jax.native.shapes import check_shape
from ksana_jax.native.target import STORED, target
from pallas_kernels.contract import Call, Kernel, Result, check_options

MAX_HEAD_DIM = 1024

QUERIES = ("float32", "bfloat16", "float16")


def attend(call: Call, work: None = None, *, tuning: None) -> Result:
    """Attends a call; `pallas_kernels.contract` has the arguments. Computes in float32.

    Raises:
      NotImplementedError: a dtype, head dim or option that the kernel does not support.
      ValueError: shapes do not fit.
    """
    options, (kv, scales, zeros, levels, rotated) = call.options, call.pool
    reads = "q_sink sinks soft_cap return_lse return_mass mass_factor out_dtype"
    check_options(call, *reads.split(), "scales", "levels", "rotated", "by_head", "latents")
    if kv.dtype.name not in STORED:
        raise NotImplementedError(f"keys and values in {kv.dtype}; the native kernel reads {', '.join(STORED)}")
    if call.q.dtype.name not in QUERIES:
        raise NotImplementedError(f"queries in {call.q.dtype}; the native kernel reads {', '.join(QUERIES)}")
    if call.q.shape[3] > MAX_HEAD_DIM:
        raise NotImplementedError(f"head dim of {call.q.shape[3]}; the native kernel has at most {MAX_HEAD_DIM}")
    call.pool.check_scales()
    _check_shapes(call)
    (s, width, n, _), (_, _, _, k, b, _), p = call.q.shape, kv.shape, call.tables.shape[-1]
    q = call.q if call.out_dtype == call.q.dtype else call.q.astype(jnp.float32)
    nothing = jnp.zeros(0, jnp.float32)
    q_sink = nothing if options.q_sink is None else options.q_sink.astype(q.dtype)
    numbers = jnp.stack([jnp.asarray(x, jnp.int32) for x in (call.layer, *call.effective_pattern)])
    array = jax.ShapeDtypeStruct
    results = (
        array(q.shape, q.dtype),
        array((s, width, n), jnp.float32),
        array((s, k, p * b) if options.return_mass else (0,), jnp.float32),
    )
    out, lse, mass = jax.ffi.ffi_call(target("ksana_attend"), results)(
        q,
        kv,
        nothing if scales is None else scales,
        nothing if zeros is None else zeros,
        nothing if levels is None else jnp.resize(levels, (16,)),
        call.tables,
        call.starts,
        call.positions,
        numbers,
        q_sink,
        nothing if options.sinks is None else options.sinks.astype(jnp.float32),
        nothing if options.mass_factor is None else options.mass_factor,
        nothing if rotated is None else rotated,
        stored=np.int32(STORED[kv.dtype.name]),
        asked=np.int32(STORED[q.dtype.name]),
        soft_cap=np.float32(options.soft_cap or 0.0),
    )
    return Result(
        out.astype(call.out_dtype), lse if options.return_lse else None, mass if options.return_mass else None
    )


def _check_shapes(call: Call) -> None:
    (s, width, n, h), (m, layers, sides, k, b, _) = call.q.shape, call.pool.kv.shape
    queries, options, levels = f"queries are {list(call.q.shape)}", call.options, call.pool.levels
    stored = h if levels is None else h * (len(levels).bit_length() - 1) // 8
    if (rotated := call.pool.rotated) is not None:
        stored = h - rotated.shape[-1]
    check_shape("the pool", call.pool.kv.shape, (m, layers, 1 if sides == 1 else 2, k, b, stored), queries)
    if rotated is None and call.pool.scales is not None and h % (groups := math.prod(call.pool.scales.shape[5:])):
        raise ValueError(f"{groups} groups of scales, must divide a head dim of {h}: {queries}")
    if n % k:
        raise ValueError(f"{n} query heads, must be a multiple of {k} kv heads")
    check_shape("tables", call.tables.shape, (s, *(k,) * call.by_head, call.tables.shape[-1]), queries)
    check_shape("starts", call.starts.shape, call.tables.shape, f"tables are {list(call.tables.shape)}")
    wanted = {
        "positions": (call.positions, (s, width)),
        "q_sink": (options.q_sink, (s, width, call.num_sink_queries, n, h)),
        "sinks": (options.sinks, (n,)),
        "mass_factor": (options.mass_factor, (s, width)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None:
            check_shape(name, array.shape, shape, queries)


KERNEL = Kernel(attend, None)
