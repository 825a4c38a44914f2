"""A layer's two calls with packed weights, against their definition in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import NormSpec
from ksana_jax.models import layers
from ksana_jax.models.int8_matrix import Int8Matrix, quantise
from ksana_jax.models.params import init_params, quantised
from ksana_jax.ops import native_operators
from ksana_jax.ops.linear import choose_linear
from ksana_jax.ops.native_operators import PackedMatrix, PackedOperators
from ksana_jax.ops.norm import choose_norm
from ksana_jax.ops.weight_packing import can_pack, pack, packed, unpack, unpacked
from tests.machine import native_products

PLAIN = ModelConfig(vocab_size=70, d_model=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=20, d_ff=72)
EVERYTHING = dataclasses.replace(
    PLAIN,
    **{"norm_placement": "both", "norm": "rms_plus_one", "mlp": "geglu", "qk_norm": "head"},
    **{"qkv_bias": True, "out_bias": True, "mlp_bias": True},
)
AFTER = dataclasses.replace(PLAIN, norm_placement="after", qk_norm="projection")
TIED = dataclasses.replace(PLAIN, tie_embeddings=True)
CONFIGS = {"plain": PLAIN, "everything": EVERYTHING, "after": AFTER}


def drawn(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def weights(config, dtype, quantization=None):
    """Weights large enough that every part counts, with vectors that are neither 0 nor 1."""
    params = init_params(config, dtype=jnp.dtype(dtype), std=0.3)
    rng = np.random.default_rng(0)
    vectors = jax.tree.map(
        lambda w: w + jnp.asarray(0.2 * rng.normal(size=w.shape), dtype) if w.ndim == 1 else w, params
    )
    return quantised(vectors, quantization)


def exact(w):
    if isinstance(w, Int8Matrix):
        return np.asarray(w.codes, np.float64) * np.asarray(w.scales, np.float64)[:, None]
    return np.asarray(w, np.float64)


class Definition:
    """A layer in float64, with attention that only mixes its inputs."""

    def __init__(self, p, config):
        self.p, self.config = p, config

    def linear(self, x, name):
        bias, w = getattr(self.p, f"b_{name}"), getattr(self.p, f"w_{name}")
        if isinstance(w, Int8Matrix) and w.rounds_inputs:
            scale = abs(x).max(-1, keepdims=True) / 127
            x = np.round(x / scale) * scale
        return x @ exact(w).T + (0.0 if bias is None else exact(bias))

    def norm(self, x, weight):
        if weight is None:
            return x
        weight = exact(weight) + (self.config.norm == "rms_plus_one")
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * weight

    def heads(self, x):
        normed = self.norm(x, self.p.attn_norm)
        q, k, v = (self.linear(normed, n) for n in "qkv")
        q, k = self.norm(q, self.p.q_proj_norm), self.norm(k, self.p.k_proj_norm)
        q, k, v = (y.reshape(*x.shape[:-1], -1, self.config.head_dim) for y in (q, k, v))
        return self.norm(q, self.p.q_norm), self.norm(k, self.p.k_norm), v

    def rest(self, x, attended):
        x = x + self.norm(self.linear(attended, "o"), self.p.post_attn_norm)
        normed = self.norm(x, self.p.mlp_norm)
        gate, up = self.linear(normed, "gate"), self.linear(normed, "up")
        if self.config.mlp == "swiglu":
            active = gate / (1 + np.exp(-gate))
        else:
            active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return x + self.norm(self.linear(active * up, "down"), self.p.post_mlp_norm)


def operators(dtype):
    return choose_linear("cpu", dtype, "packed").operators(choose_norm("cpu", dtype, ("rms",)).load())


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("as_codes", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
# Numbers of bfloat16 in tiles of AMX: less than one, one, two and more, more than are multiplied at once.
@pytest.mark.parametrize("depth", [8, 32, 72, 1100])
def test_products_of_any_depth_are_those_of_float64_and_rows_do_not_depend_on_each_other(depth, dtype, as_codes):
    x, w = drawn(75, depth, dtype=dtype), drawn(130, depth, dtype=dtype)
    w = quantise(w) if as_codes else w
    multiply = jax.jit(functools.partial(operators(dtype).linear, dtype=jnp.float32))
    found = multiply(x, pack(w))
    np.testing.assert_allclose(found, exact(x) @ exact(w).T, atol=2e-5 * depth**0.5)
    for begin, end in ((0, 1), (3, 19), (20, 37), (30, 62), (10, 75)):
        np.testing.assert_array_equal(multiply(x[begin:end], pack(w)), found[begin:end])


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layers_are_those_of_float64_and_rows_do_not_depend_on_each_other(config, dtype, quantization):
    params = weights(config, dtype, quantization)
    [p], [packed_p], [spec] = params.layers, packed(params, config).layers, config.layers
    x, attended = drawn(150, config.d_model, dtype=dtype), drawn(150, config.num_heads, config.head_dim, dtype=dtype)
    heads = jax.jit(lambda x: operators(dtype).queries_keys_values(x, packed_p, spec))
    rest = jax.jit(lambda x, attended: operators(dtype).after_attention(x, attended, packed_p, spec))
    found = *heads(x), rest(x, attended)
    definition = Definition(p, config)
    wanted = *definition.heads(exact(x)), definition.rest(exact(x), exact(attended).reshape(150, -1))
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        if quantization == "w8a8":  # a number that lies between two codes may get either
            assert np.sqrt(np.mean((exact(a) - b) ** 2)) < (2e-3 if dtype == "float32" else 1e-2) * abs(b).max()
            continue
        np.testing.assert_allclose(exact(a), b, rtol=0, atol=(2e-6 if dtype == "float32" else 1.5e-2) * abs(b).max())
    for rows in (slice(0, 1), slice(5, 12), slice(100, 150)):
        again = *heads(x[rows]), rest(x[rows], attended[rows])
        for a, b in zip(again, found, strict=True):
            np.testing.assert_array_equal(exact(a), exact(b[rows]))
    assert "ksana_rest_of_layer" in rest.lower(x, attended).as_text()


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("as_codes", [False, True])
@pytest.mark.parametrize(("columns", "inner"), [(1, 4), (7, 32), (64, 64), (100, 1100)])
def test_packed_products_are_those_of_float64(columns, inner, as_codes, dtype):
    x, b, w = drawn(5, inner, dtype=dtype), drawn(columns, dtype=dtype), drawn(columns, inner, dtype=dtype)
    w = quantise(w) if as_codes else w
    linear = native_operators.linear
    wanted = exact(x) @ exact(w).T + exact(b)
    largest = float((abs(exact(x)) @ abs(exact(w)).T).max())
    errors = {"float32": 1e-6, "float16": 2e-3, None: 1e-6 if dtype == "float32" else 1e-2}
    found = jax.jit(lambda x, w, b: [linear(x, w, b, dtype=asked) for asked in errors])(x, pack(w), b)
    for y, (asked, error) in zip(found, errors.items(), strict=True):
        assert y.dtype == (asked or dtype)
        np.testing.assert_allclose(exact(y), wanted, rtol=0, atol=error * largest)


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("columns", "inner"), [(7, 32), (64, 64), (100, 1100)])
def test_products_of_codes_with_codes_are_exact(columns, inner, dtype):
    x, w = drawn(9, inner, dtype=dtype), quantise(drawn(columns, inner), rounds_inputs=True)
    x = x.at[3].set(0).at[4, 1].set(jnp.inf)
    found = jax.jit(lambda x, w: native_operators.linear(x, w, dtype=jnp.float32))(x, pack(w))
    finite = np.arange(9) != 4
    largest = np.abs(np.asarray(x, np.float32)).max(axis=1, keepdims=True)[finite]
    factors = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    codes = np.round(np.asarray(x, np.float32)[finite] * factors).astype(np.int64)
    assert codes.max() == 127
    wanted = codes @ np.asarray(w.codes, np.int64).T * np.float64(largest / 127) * exact(w.scales)
    np.testing.assert_allclose(exact(found)[finite], wanted, rtol=1e-6)
    assert not np.isfinite(exact(found)[~finite]).any(), "what is not finite is not hidden"
    by_xla = layers.linear(x, w, dtype=jnp.float32)
    np.testing.assert_allclose(exact(by_xla)[finite], wanted, rtol=1e-6)
    assert not np.isfinite(exact(by_xla)[~finite]).any()


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
def test_a_row_of_a_packed_product_is_the_same_whatever_stands_beside_it(dtype, quantization):
    x, w = drawn(150, 1100, dtype=dtype), drawn(100, 1100, dtype=dtype)
    w = pack(quantise(w, rounds_inputs=quantization == "w8a8") if quantization else w)
    linear, rows = native_operators.linear, [slice(40, 40 + n) for n in (1, 2, 3, 4, 5, 7, 23)]
    whole, *parts = jax.jit(lambda x, w: [linear(part, w) for part in (x, *(x[some] for some in rows))])(x, w)
    for some, part in zip(rows, parts, strict=True):
        np.testing.assert_array_equal(exact(part), exact(whole[some]))


@native_products
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_a_norm_in_one_call_have_the_bits_of_one_after_the_other(dtype):
    x, norm, w, other = (drawn(*shape, dtype=dtype) for shape in ((9, 48), (48,), (100, 48), (70, 48)))
    norms, device = NormSpec("rms", 1e-5, "before"), operators(dtype)
    together = jax.jit(lambda x, *matrices: device.normed_products(x, norm, norms, matrices))
    normed = device.normed(x, norm, norms)
    for found, matrix in zip(together(x, pack(w), pack(other)), (w, other), strict=True):
        np.testing.assert_array_equal(found, device.linear(normed, pack(matrix)))
    assert device.normed_products(x, norm, norms, [w, pack(other)]) is None


@native_products
def test_what_cannot_be_packed_is_computed_from_weights_as_they_are():
    config = dataclasses.replace(PLAIN, d_model=47)  # no whole number of words of bfloat16
    params = weights(config, "bfloat16")
    [p], [found] = params.layers, packed(params, config).layers
    assert not isinstance(found.w_q, PackedMatrix) and isinstance(found.w_o, PackedMatrix)
    x = drawn(3, 47, dtype="bfloat16")
    for a, b in zip(
        operators("bfloat16").queries_keys_values(x, found, config.layers[0]),
        Definition(p, config).heads(exact(x)),
        strict=True,
    ):
        np.testing.assert_allclose(exact(a), b, rtol=0, atol=1.5e-2 * abs(b).max())


@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
def test_packing_keeps_every_number_and_may_consume_its_source(quantization):
    params = weights(EVERYTHING, "float32", quantization)
    kept = jax.tree.map(np.asarray, params)
    made = packed(params, EVERYTHING)
    jax.tree.map(np.testing.assert_array_equal, unpacked(made), kept)
    assert packed(made, EVERYTHING).layers[0].w_q is made.layers[0].w_q, "packed once"
    assert jax.tree.map(jnp.shape, jax.eval_shape(lambda: made)) == jax.tree.map(
        jnp.shape, packed(jax.eval_shape(lambda: params), EVERYTHING)
    )
    consumed = packed(params, EVERYTHING, consume=True)
    jax.tree.map(np.testing.assert_array_equal, unpacked(consumed), kept)
    matrix = params.layers[0].w_gate
    assert (matrix.codes if quantization else matrix).is_deleted() and not params.layers[0].mlp_norm.is_deleted()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_loop_looks_up_rows_of_16_bits_without_a_copy_of_the_table_in_float32(is_packed):
    params = weights(TIED, "bfloat16")
    table = packed(params, TIED).embed if is_packed else params.embed
    loop = jax.jit(lambda table, steps: jax.lax.map(lambda tokens: PackedOperators().embed(table, tokens), steps))
    program = loop.lower(table, jnp.zeros((8, 1), jnp.int32)).compile().as_text()
    shape = table.words.shape if is_packed else table.shape
    assert f"f32[{','.join(map(str, shape))}]" not in program


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_that_is_the_head_too_is_packed_and_looked_up_in_its_panels(dtype):
    params = weights(TIED, dtype)
    made, tokens = packed(params, TIED), jnp.asarray([[0, 63, 64], [69, 5, 5]])
    assert isinstance(made.embed, PackedMatrix) and made.head is None
    found = jax.jit(PackedOperators().embed)(made.embed, tokens)
    np.testing.assert_array_equal(exact(found), exact(params.embed)[tokens])
    np.testing.assert_array_equal(exact(unpacked(made).embed), exact(params.embed))
    own = dataclasses.replace(TIED, tie_embeddings=False)
    assert isinstance(packed(weights(own, dtype), own).embed, jax.Array), "it is only looked up"


def test_only_matrices_of_whole_words_are_packed():
    assert [can_pack(drawn(3, n, dtype="bfloat16")) for n in (1, 2, 3)] == [False, True, False]
    assert can_pack(drawn(3, 1)) and not can_pack(drawn(2, 3, 4)) and not can_pack(pack(drawn(3, 4)))
    assert not can_pack(quantise(drawn(3, 6))) and can_pack(quantise(drawn(3, 8)))
    assert pack(drawn(70, 6)).shape == (70, 6) and unpack(drawn(3, 2)).shape == (3, 2)
