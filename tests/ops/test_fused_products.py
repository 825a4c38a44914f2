"""Operators that fuse products with their neighbours: the same layers, and the parts that a kernel computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.models import layers
from ksana_jax.models.joined import joined
from ksana_jax.models.operators import Operators
from ksana_jax.models.params import init_params, quantised
from ksana_jax.ops.fused_products import FusedOperators, linear
from pallas_kernels import product_reference
from pallas_kernels.contract import Kernel, Product
from pallas_kernels.hopper.product import pays
from pallas_kernels.registry import PRODUCTS
from tests.pallas_kernels.interpreter import PARAMS, interpreting

PLAIN = ModelConfig(vocab_size=70, d_model=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, d_ff=192)
BIASED = dataclasses.replace(
    PLAIN,
    **{"norm": "rms_plus_one", "mlp": "geglu", "qk_norm": "head"},
    **{"qkv_bias": True, "out_bias": True, "mlp_bias": True},
)
SANDWICH = dataclasses.replace(PLAIN, norm_placement="both")
AFTER = dataclasses.replace(PLAIN, norm_placement="after", qk_norm="projection")
CONFIGS = {"plain": PLAIN, "biased": BIASED, "sandwich": SANDWICH, "after": AFTER}


def layer(config, quantization=None):
    """A layer with joined weights, large enough that every part counts, and vectors that are neither 0 nor 1."""
    rng = np.random.default_rng(0)
    params = init_params(config, dtype=jnp.bfloat16, std=0.1)
    params = jax.tree.map(
        lambda w: w + jnp.asarray(0.2 * rng.normal(size=w.shape), w.dtype) if w.ndim == 1 else w, params
    )
    return joined(quantised(params, quantization), config).layers[0], config.layers[0]


def recording(calls: list[Product]) -> Kernel[jax.Array]:
    """The reference as a kernel, which keeps its calls."""

    def run(call: Product, work: None, *, tuning: None) -> jax.Array:
        calls.append(call)
        return product_reference.multiply(call)

    return Kernel(run, None)


def both_parts(operators, config, p, spec, rows):
    rng = np.random.default_rng(rows)
    x, attended = (
        jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for shape in ((rows, config.d_model), (rows, config.num_heads, config.head_dim))
    )
    return *operators.queries_keys_values(x, p, spec), operators.after_attention(x, attended, p, spec, p)


def compare(actual, wanted):
    """Tolerance for rounding each of four arrays between the parts of a layer to bfloat16, or not."""
    for a, b in zip(actual, wanted, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-6 * abs(b).max())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layers_are_those_of_xla(config):
    calls, (p, spec) = [], layer(config)
    compare(
        both_parts(FusedOperators(kernel=recording(calls)), config, p, spec, 16),
        both_parts(Operators(), config, p, spec, 16),
    )
    fused = [(call.w.shape[0], call.norm is not None, call.residual is not None, call.activation) for call in calls]
    activation = "gelu_tanh" if config is BIASED else "silu"
    d, f, before, after = config.d_model, config.d_ff, config is not AFTER, config in (SANDWICH, AFTER)
    wanted = [
        (256, before, False, None),
        (d, False, True, None),
        (2 * f, before, False, activation),
        (d, False, True, None),
    ]
    assert fused == (wanted[::2] if after else wanted)
    assert all((call.bias is not None) == (config is BIASED) for call in calls)


def test_a_kernel_asks_for_the_matrix_that_the_next_one_reads():
    calls, (p, spec) = [], layer(PLAIN)
    both_parts(FusedOperators(kernel=recording(calls)), PLAIN, p, spec, 8)
    assert [call.ahead is w for call, w in zip(calls, (p.w_o, p.w_gate_up, p.w_down, p.w_qkv), strict=True)] == [
        True
    ] * 4
    calls.clear()
    both_parts(FusedOperators(kernel=recording(calls)), PLAIN, p, spec, 24)  # XLA's next product may find it there, too
    [gated] = calls
    assert gated.activation == "silu" and gated.ahead is p.w_down


@pytest.mark.parametrize(("rows", "quantization"), [(12, None), (72, None), (8, "int8")])
def test_other_steps_and_weights_are_left_to_xla(rows, quantization):
    calls, (p, spec) = [], layer(PLAIN, quantization)
    got = both_parts(FusedOperators(kernel=recording(calls)), PLAIN, p, spec, rows)
    compare(got, both_parts(Operators(), PLAIN, p, spec, rows))
    assert not calls


def test_the_kernel_itself_gives_the_same_layer():
    p, spec = layer(PLAIN)
    operators = FusedOperators(kernel=PRODUCTS["hopper_product"].tuned(interpret=PARAMS))
    with interpreting():
        actual = jax.block_until_ready(both_parts(operators, PLAIN, p, spec, 8))
    compare(actual, both_parts(Operators(), PLAIN, p, spec, 8))


def of_llama(rows, depth, width, **options):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, depth), (width, depth)))
    return Product(x, w, **options)


@pytest.mark.parametrize("rows", [8, 16, 24, 64])
def test_of_many_rows_only_gated_products_are_not_left_to_xla(rows):
    assert pays(of_llama(rows, 4096, 28_672, activation="silu"))
    others = of_llama(rows, 4096, 6144), of_llama(rows, 4096, 4096), of_llama(rows, 14_336, 4096)
    assert [pays(call) for call in others] == [rows <= 16] * 3


def test_products_alone_are_those_of_xla_where_the_kernel_does_not_pay():
    x, w = jnp.ones((3, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    np.testing.assert_array_equal(linear(x, w, dtype=jnp.float32), layers.linear(x, w, dtype=jnp.float32))
    np.testing.assert_array_equal(linear(x, w), layers.linear(x, w))
