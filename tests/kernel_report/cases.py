"""Cases compiled for each target to show that the kernels would run there: shapes of models, one option at a time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import aot, int4
from pallas_kernels.contract import Call, Kernel, Options, Pool, Product, Write
from pallas_kernels.patterns import Pattern
from tests.kernel_report.check import Case

# Pools of a size that no temporary has by accident: 4,096 blocks of two layers.
NUM_BLOCKS, NUM_LAYERS, TABLE_WIDTH = 4096, 2, 64
# Options of the contract, each from the decode of a Llama-8B shape: 32 rows, 32 query heads, 8 kv heads.
DECODE: tuple[dict[str, Any], ...] = (
    {},
    {"h": 64},
    {"h": 96, "b": 32},
    {"h": 256},
    {"b": 16},
    {"b": 32},
    {"b": 128},
    {"k": 32},
    {"n": 8, "k": 1},
    {"dtype": "float16"},
    {"soft_cap": 30.0},
    {"sinks": 1},
    {"sinks": 4},
    {"h": 256, "sinks": 4},
)
# Keys that are stored unrotated.
ROTATED: tuple[dict[str, Any], ...] = tuple({"h": h, "rotated": True} for h in (64, 96, 128, 256))
# As many queries as swapped operands take, then more.
TILES: tuple[dict[str, Any], ...] = (
    {"q": 4},
    {"q": 4, "codes": "int8", "sinks": 4},
    {"q": 4, "codes": "float8_e4m3fn", "soft_cap": 30.0, "sinks": 4},
    {"q": 4, "codes": "int4", "sinks": 4},
    {"q": 4, "codes": "int8", "h": 256, "sinks": 4},
    {"q": 16},
    {"q": 16, "h": 64, "b": 16},
    {"q": 16, "h": 256},
    {"q": 16, "sinks": 4},
    {"q": 16, "h": 256, "sinks": 4},
    {"q": 16, "codes": "int8", "sinks": 4},
    {"q": 16, "codes": "int8", "h": 256, "b": 16},
    {"q": 16, "codes": "float8_e4m3fn"},
    {"q": 16, "codes": "float8_e4m3fn", "h": 256, "b": 32, "soft_cap": 30.0},
    {"swapped": False, "codes": "float8_e4m3fn", "h": 256, "b": 32, "soft_cap": 30.0, "sinks": 4},
    {"q": 16, "codes": "int4", "h": 256, "soft_cap": 30.0, "sinks": 4},
)
QUANTISED: tuple[dict[str, Any], ...] = (
    {"codes": "int8"},
    {"codes": "int8", "h": 64, "b": 16},
    {"codes": "int8", "h": 64, "sinks": 1},
    {"codes": "int8", "b": 128, "sinks": 1},
    {"codes": "int8", "sinks": 4},
    {"codes": "int8", "h": 256, "b": 16},
    {"codes": "float8_e4m3fn"},
    {"codes": "float8_e4m3fn", "h": 96, "b": 32, "soft_cap": 30.0},
    {"codes": "float8_e4m3fn", "h": 256, "b": 32, "soft_cap": 30.0, "sinks": 4},
    {"codes": "int4"},
    {"codes": "int4", "h": 64, "b": 128},
    {"codes": "int4", "sinks": 4},
    {"codes": "int4", "h": 256, "soft_cap": 30.0, "sinks": 4},
)
PREFILL: tuple[dict[str, Any], ...] = (
    {"q": 32},
    {"q": 32, "h": 64},
    {"q": 32, "h": 96, "b": 32},
    {"q": 32, "b": 16, "soft_cap": 30.0},
    {"q": 32, "b": 128, "dtype": "float16"},
    {"q": 32, "h": 256},
    {"q": 32, "sinks": 1},
    {"q": 32, "h": 256, "b": 16, "sinks": 4},
    {"q": 32, "sinks": 4},
    *({"q": 32, "h": h, "registers": False} for h in (64, 96, 128, 256)),
    {"q": 32, "sinks": 4, "registers": False},
    {"q": 32, "codes": "int8"},
    {"q": 32, "codes": "float8_e4m3fn"},
    {"q": 32, "codes": "int4"},
    {"q": 32, "codes": "int8", "h": 64, "b": 16, "sinks": 4},
    {"q": 32, "codes": "float8_e4m3fn", "h": 96, "b": 32, "soft_cap": 30.0},
    {"q": 32, "codes": "float8_e4m3fn", "b": 16, "sinks": 4, "soft_cap": 30.0},
    {"q": 32, "codes": "int4", "h": 64, "b": 128, "sinks": 1},
)
# Latents of DeepSeek's size, of few and of many query heads; then what a kernel has to pad or cut.
LATENT: tuple[dict[str, Any], ...] = (
    {"n": 16},
    {"n": 128},
    {"n": 20, "q": 3},
    {"n": 40, "h": 320, "b": 16, "dtype": "float16"},
    {"n": 16, "codes": "int8"},
    {"n": 128, "codes": "int8"},
    {"n": 20, "b": 16, "codes": "int8"},
)
MASS: tuple[dict[str, Any], ...] = ({}, {"h": 64, "b": 16}, {"h": 256}, {"q": 16})
WRITES: tuple[dict[str, Any], ...] = (
    {},
    {"h": 64},
    {"n": 4, "k": 1},
    {"norms": True},
    {"sinks": 4},
    {"codes": "int8"},
    {"codes": "float8_e4m3fn"},
)
# The products of a layer of Llama-8B, with their fused neighbours.
LAYER: dict[str, dict[str, Any]] = {
    "qkv": {"d": 4096, "f": 6144, "norm": True},
    "output": {"d": 4096, "f": 4096, "residual": True},
    "gate_up": {"d": 4096, "f": 14_336, "norm": True, "activation": "silu"},
    "down": {"d": 14_336, "f": 4096, "residual": True},
}
# By rows and name; then products that Llama-8B lacks.
PRODUCTS: tuple[dict[str, Any], ...] = (
    *({"rows": rows, "product": name} for rows in (8, 64) for name in LAYER),
    {"rows": 16, "product": "gate_up"},
    {"rows": 32, "product": "down"},
    {"rows": 64, "product": "gate_up", "plus_one": True, "activation": "gelu_tanh", "bias": True},
    {"rows": 40, "product": "qkv", "bias": True, "residual": True},
)


def cases(target: aot.Target) -> list[Case]:
    """All of them for one target."""
    from pallas_kernels.hopper import mass
    from pallas_kernels.hopper.schedule import Tuning
    from pallas_kernels.registry import KERNELS, KV_WRITES
    from pallas_kernels.registry import PRODUCTS as PRODUCT_KERNELS

    found = []
    if target.hopper:
        shapes = (*DECODE, *TILES, *QUANTISED)
        found += attention("hopper attention", KERNELS["hopper_decode"], shapes)
        found += attention("hopper prefill", KERNELS["hopper_prefill"], PREFILL)
        latents = tuple({"k": 1, "sides": 1, "h": 576} | shape for shape in LATENT)
        found += attention("hopper latent attention", KERNELS["hopper_latent"], latents)
        found += attention("hopper mass", Kernel(_mass_alone(mass.probability_mass), Tuning()), MASS)
        write, product = KV_WRITES["hopper_kv_write"], PRODUCT_KERNELS["hopper_product"]
        found += [
            Case("hopper kv write", shape, functools.partial(kv_write_program, kernel=write, **shape))
            for shape in WRITES
        ]
        found += [
            Case("hopper product", shape, functools.partial(product_program, kernel=product, **shape))
            for shape in PRODUCTS
        ]
    found += attention("triton decode", KERNELS["triton_decode"], (*DECODE, *ROTATED))
    shapes = [shape | {"q": 16} for shape in ({}, {"h": 256}, *ROTATED)]
    found += attention("triton ragged", KERNELS["triton_ragged"], shapes)
    return found


def _mass_alone(probability_mass):
    """As an attention, but without the one whose log-sum-exp it takes."""

    def attend(call: Call, work: None, *, tuning):
        return probability_mass(call, jnp.zeros(call.q.shape[:3], jnp.float32), tuning=tuning)

    return attend


def attention(name: str, kernel: Kernel, shapes):
    """Cases of an attention kernel; see `attention_program` for the shapes."""
    return [Case(name, shape, functools.partial(attention_program, kernel=kernel, **shape)) for shape in shapes]


def attention_program(
    target: aot.Target,
    *,
    kernel: Kernel,
    s=32,
    q=1,
    n=32,
    k=8,
    h=128,
    b=64,
    sinks=0,
    dtype="bfloat16",
    codes=None,
    soft_cap=None,
    rotated=False,
    sides=2,
    **tuning,
):
    """One call with a log-sum-exp and numbers of the pattern that are known only on the device.

    Args:
      s, q, n, k, h, b: rows, queries of each, query heads, kv heads, head dim, tokens of a block.
      sinks: queries for repositioned sinks; 0 for none. codes: 8-bit type, or int4, of a quantised pool.
      rotated: keys are rotated when they are read. sides: of the pool; 1 for latents, in codes all but 64 numbers.
      tuning: fields of the kernel's tuning.
    """
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    kv = jax.ShapeDtypeStruct((NUM_BLOCKS, NUM_LAYERS, sides, k, b, h), jnp.dtype(codes or dtype))
    pool = Pool(kv, jax.ShapeDtypeStruct(kv.shape[:-1], jnp.float32) if codes else None)
    if codes == "int4":
        pool = pool._replace(scales=jax.ShapeDtypeStruct(int4.scales_shape(kv.shape), jnp.bfloat16))
    elif codes and sides == 1:
        shapes = ((h - 64, codes), ((h - 64) // 128, "float32"), (64, "bfloat16"))
        codes_of, scales, apart = (jax.ShapeDtypeStruct((*kv.shape[:-1], n), jnp.dtype(kind)) for n, kind in shapes)
        pool = Pool(codes_of, scales, rotated=apart)
    table, half = ints((s, TABLE_WIDTH)), jax.ShapeDtypeStruct((TABLE_WIDTH * b, h // 2), jnp.float32)
    call = Call(
        floats((s, q, n, h)),
        pool,
        table,
        table,
        ints((s, q)),
        layer=ints(()),
        pattern=Pattern(*(ints(()),) * len(Pattern._fields)),
        options=Options(
            floats((s, q, sinks, n, h)) if sinks else None,
            key_rope=(half, half) if rotated else None,
            soft_cap=soft_cap,
            return_lse=True,
        ),
    )
    tuned = kernel.tuned(**tuning)
    return aot.lower(target, lambda call: tuned(call), call)


def kv_write_program(
    target: aot.Target, *, kernel: Kernel, t=64, n=32, k=8, h=128, b=64, sinks=0, norms=False, codes=None
):
    """One write to a pool that is taken over from the caller.

    Args:
      t, n, k, h, b: tokens, query heads, kv heads, head dim, tokens of a block.
      sinks: queries for repositioned sinks; 0 for none.
      norms: queries and keys are normed. codes: 8-bit type of a quantised pool.
    """
    array, bf16, f32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.float32
    kv = array((NUM_BLOCKS, NUM_LAYERS, 2, k, b, h), jnp.dtype(codes or bf16))
    norm = array((h,), bf16) if norms else None
    half, sink = array((t, h // 2), f32), array((t, sinks, h // 2), f32)
    call = Write(
        array((t, n, h), bf16),
        array((t, k, h), bf16),
        array((t, k, h), bf16),
        Pool(kv, array(kv.shape[:-1], f32) if codes else None),
        array((t,), jnp.int32),
        (half, half),
        layer=array((), jnp.int32),
        q_norm=norm,
        k_norm=norm,
        sink_rope=(sink, sink) if sinks else None,
        q_scale=h**-0.5,
    )

    def run(pool: Pool, call: Write):
        return kernel(dataclasses.replace(call, pool=pool))

    return aot.lower(target, run, call.pool, dataclasses.replace(call, pool=Pool(None)), donate_argnums=0)


def product_program(target: aot.Target, *, kernel: Kernel, rows: int, product: str, **changes: Any):
    """One product of a layer of Llama-8B. changes: to its entry in `LAYER`; "bias": with one; "plus_one"."""
    shape: dict[str, Any] = LAYER[product] | changes
    d, f, activation = shape["d"], shape["f"], shape.get("activation")
    width = f if activation is None else 2 * f

    def array(*dims: int):
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    call = Product(
        array(rows, d),
        array(width, d),
        array(d) if shape.get("norm") else None,
        array(width) if shape.get("bias") else None,
        array(rows, f) if shape.get("residual") else None,
        plus_one=shape.get("plus_one", False),
        activation=activation,
    )
    return aot.lower(target, lambda call: kernel(call), call)
