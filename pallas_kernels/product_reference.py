"""A product of few rows with a matrix in plain jax.numpy: kernels of a `contract.Product` must equal it.

Sums and later operations are float32, and the result is rounded once; with a residual twice, as the sum of two arrays
is. Normed rows are not rounded here: a kernel rounds them before or after it multiplies them with 1 / their root mean
square.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.contract import Kernel, Product

# Functions of the gate, by `Product.activation`.
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def check(call: Product) -> None:
    """Raises ValueError where shapes or options of a product do not fit together."""
    if call.activation is not None and call.activation not in ACTIVATIONS:
        raise ValueError(f"activation is {call.activation!r}, must be None or one of {', '.join(ACTIVATIONS)}")
    (rows, depth), width = call.x.shape, call.w.shape[0] // call.parts
    wanted = {
        "w": (width * call.parts, depth),
        "norm": (depth,),
        "bias": (width * call.parts,),
        "residual": (rows, width),
    }
    for name, shape in wanted.items():
        x = getattr(call, name)
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, not {shape}, with x {call.x.shape}")


def multiply(call: Product, work: None = None, *, tuning: None = None) -> jax.Array:
    """Returns the product of a call, [T, F] in x's dtype.

    Raises:
      ValueError: shapes or options that do not fit together.
    """
    check(call)
    x = call.x.astype(jnp.float32)
    if call.norm is not None:
        weight = call.norm.astype(jnp.float32) + call.plus_one
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + call.eps) * weight
    out = jnp.matmul(x, call.w.astype(jnp.float32).T, precision="highest")
    if call.bias is not None:
        out = out + call.bias.astype(jnp.float32)
    if call.activation is not None:
        gate, up = jnp.split(out, 2, axis=1)
        out = ACTIVATIONS[call.activation](gate) * up
    out = out.astype(call.x.dtype)
    return out if call.residual is None else out + call.residual


KERNEL = Kernel(multiply, None)
