"""What every implementation of ragged paged attention is held to: one comparison with the reference, one tolerance."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import int4, latent8, reference
from pallas_kernels.arguments import Spec, make
from pallas_kernels.contract import Call, Kernel, Pool, Result

# Kernels round each weight of the softmax to the pool's 16 bits, and the result once more: each by at most half a unit
# in the last place, 2^-8 of the value in bfloat16 (8 bits) and 2^-11 in float16 (11 bits). The weighted sum of |v|
# bounds what both come to.
RELATIVE = {"bfloat16": 2 * 2.0**-8, "float16": 2 * 2.0**-11}
# Scores and sums are float32 (2^-24), a few hundred terms; exp2 of the hardware is good to 2^-22.
ABSOLUTE = 2e-5
LSE = 1e-4


@functools.cache
def _jitted(run, tuning):
    """One for each kernel: specs of the same shapes share its compilation, which counts for more than its speed."""
    options: dict[str, Any] = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    return jax.jit(lambda call: run(call, None, tuning=tuning), compiler_options=options)


@functools.cache
def expected(spec: Spec):
    """Of the reference, in float32: result, log-sum-exp, and the weighted sums of the values' absolutes."""
    call = as_multiplied(make(spec)).replace(return_lse=True, out_dtype=jnp.dtype("float32"))
    attend = _jitted(reference.attend, None)
    out, lse, _ = attend(call)
    kv, scales, *_ = call.pool
    if kv.dtype == jnp.int4:
        kv, scales = int4.dequantise(kv, scales), None
    absolute_values = np.concatenate([kv, kv], axis=2) if spec.sides == 1 else np.array(kv)
    absolute_values[:, :, 1] = np.abs(absolute_values[:, :, 1])
    absolute = attend(call.replace(pool=Pool(jnp.asarray(absolute_values), scales))).out
    return np.asarray(out), np.asarray(lse), np.asarray(absolute)


def as_multiplied(call: Call) -> Call:
    """Returns a call with latents in 8 bits as the bfloat16 numbers that kernels multiply, any other as it is."""
    kv, scales, *_, rotated = call.pool
    if rotated is None:
        return call
    return call.replace(pool=Pool(latent8.dequantise(kv, scales, rotated).astype(jnp.bfloat16)))


def check(kernel: Kernel, spec: Spec) -> None:
    """Asserts that a kernel gives the reference's result and log-sum-exp."""
    compare(_jitted(kernel.run, kernel.tuning)(make(spec)), spec)


def expect_unsupported_is_named(kernel: Kernel, spec: Spec) -> None:
    """Asserts that a Hopper kernel says of specs that it cannot serve what is the matter."""
    for changes, message in (
        ({"head_dim": 80}, "head dim of 80"),
        ({"block_size": 8}, "blocks of 8 tokens"),
        ({"num_heads": 130, "num_kv_heads": 1}, "130 query heads to a kv head"),
        ({"dtype": "float32"}, "keys and values in float32"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            kernel(make(dataclasses.replace(spec, **changes)))


def compare(result: Result, spec: Spec) -> None:
    """Asserts that a result, and with `return_lse` its log-sum-exp, are the reference's for a spec."""
    out, lse, absolute = expected(spec)
    actual, actual_lse, _ = result
    assert (actual_lse is not None) == spec.return_lse
    if actual_lse is not None:
        assert actual_lse.dtype == jnp.float32 and actual_lse.shape == lse.shape
        np.testing.assert_allclose(np.asarray(actual_lse), lse, rtol=0, atol=LSE, err_msg=str(spec))
    assert actual.dtype == spec.dtype and actual.shape == out.shape
    error = np.abs(np.asarray(actual, np.float32) - out)
    allowed = RELATIVE[spec.dtype] * absolute + ABSOLUTE
    worst = np.unravel_index(np.argmax(np.nan_to_num(error / allowed, nan=np.inf)), error.shape)
    assert (error <= allowed).all(), (
        f"{spec}: at [tile, query, head, dim] {tuple(map(int, worst))} {float(actual[worst]):.6g} instead of "
        f"{out[worst]:.6g}; {float(error[worst]):.3g} off, {float(allowed[worst]):.3g} allowed"
    )
