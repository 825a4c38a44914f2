"""Norms in C++, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.models import layers
from ksana_jax.models.layers import NORMS
from ksana_jax.native.operators import rms_norm
from ksana_jax.ops.native_operators import normaliser
from ksana_jax.ops.norm import choose_norm, not_native
from tests.machine import compiled, no_compiler

EPS = 1e-3


def drawn(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


@compiled
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 2, 24), (3, 100), (70, 192)])
def test_norms_are_those_of_float64(shape, dtype, kind):
    x, weight = drawn(*shape, dtype=dtype), drawn(*(2,) * NORMS[kind].bias, shape[-1], dtype=dtype)
    got = jax.jit(normaliser(NormSpec(kind, EPS, False)))(x, weight)
    assert (got.shape, got.dtype) == (x.shape, x.dtype)
    x, weight = (np.asarray(a, np.float64) for a in (x, weight))
    bias = 0.0
    if kind.startswith("layer"):
        x -= x.mean(-1, keepdims=True)
        weight, bias = (weight[0], weight[1]) if NORMS[kind].bias else (weight, bias)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (weight + bool(NORMS[kind].plus_one)) + bias
    # Two roundings to 8 bits in bfloat16; some of 24 bits in float32, of sums and differences of numbers up to 6.
    tolerances = {"rtol": 2.0**-7 if dtype == "bfloat16" else 1e-6, "atol": 2e-6 * kind.startswith("layer")}
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, **tolerances)


@compiled
@pytest.mark.parametrize("kind", ["rms", "layer_no_bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_the_same_whatever_stands_beside_it(dtype, kind):
    norm = jax.jit(normaliser(NormSpec(kind, EPS, False)))
    x, weight = drawn(700, 96, dtype=dtype), drawn(96, dtype=dtype)
    whole = np.asarray(norm(x, weight), np.float32)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 20), slice(64, 555)):
        np.testing.assert_array_equal(np.asarray(norm(x[rows], weight), np.float32), whole[rows])


def test_other_platforms_types_and_kinds_get_norms_of_xla():
    for needs in (("gpu", "float32", ("rms",)), ("cpu", "float16", ("rms",)), ("cpu", "float32", ("mine",))):
        assert choose_norm(*needs).load() is layers.normaliser
    assert not_native("gpu", "float32", ("rms",)) == "needs a CPU, this is gpu"
    assert not_native("cpu", "float32", ("rms", "mine")) == f"norms are mine; native norms are {' or '.join(NORMS)}"
    assert no_compiler or choose_norm("cpu", "bfloat16", ("rms",)).load() is normaliser


@compiled
def test_other_types_are_refused():
    with pytest.raises(NotImplementedError, match="bfloat16 and float32; native norms have both in float32"):
        rms_norm(drawn(1, 8, dtype="bfloat16"), drawn(8), EPS)
