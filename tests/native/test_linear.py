"""Products with weights in C++, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.operator_settings import IMPLEMENTATION_NAMES
from ksana_jax.models import layers
from ksana_jax.models.int8_matrix import quantise
from ksana_jax.native.grouped import grouped_linear
from ksana_jax.native.operators import linear
from ksana_jax.ops.linear import LINEAR_IMPLEMENTATIONS, choose_linear
from tests.machine import native_products, no_native_products


def drawn(*shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 5, 67])
@pytest.mark.parametrize(("columns", "inner"), [(1, 1), (7, 31), (43, 64), (96, 100)])
def test_products_are_those_of_float64(rows, columns, inner, dtype):
    x, w = drawn(rows, inner, dtype=dtype), drawn(columns, inner, dtype=dtype)
    got = jax.jit(lambda x, w: linear(x, w, dtype=jnp.float32))(x, w)
    x, w = (np.asarray(a, np.float64) for a in (x, w))
    np.testing.assert_allclose(got, x @ w.T, atol=1e-6 * float((abs(x) @ abs(w).T).max()))


@native_products
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 67])
@pytest.mark.parametrize(("columns", "inner"), [(7, 31), (43, 64), (1100, 100)])
def test_products_with_codes_are_those_of_float64(rows, columns, inner, dtype):
    x, w = drawn(rows, inner, dtype=dtype), quantise(drawn(columns, inner))
    got = jax.jit(lambda x, w: choose_linear("cpu", dtype, "native").load().linear(x, w, dtype=jnp.float32))(x, w)
    x, codes, scales = (np.asarray(a, np.float64) for a in (x, w.codes, w.scales))
    w = codes * scales[:, None]
    np.testing.assert_allclose(got, x @ w.T, atol=1e-6 * float((abs(x) @ abs(w).T).max()))


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns", "inner", "parts"), [(1, 7, 128, 1), (5, 43, 96, 3), (67, 130, 384, 3)])
def test_products_with_float8_are_those_with_widened_numbers_bit_for_bit(rows, columns, inner, parts, dtype):
    rng = np.random.default_rng(rows)
    codes = rng.permutation(np.resize(np.delete(np.arange(256), [127, 255]), columns * inner))  # all but NaN
    codes = jnp.asarray(codes.astype(np.uint8).reshape(columns, inner)).view(jnp.float8_e4m3fn)
    scales = jnp.asarray(np.exp2(rng.uniform(-9, 2, (columns, parts))), jnp.float32)
    product = jax.jit(lambda x, w, scales: linear(x, w, dtype=jnp.float32, scales=scales))
    x, w = drawn(rows, inner, dtype=dtype), codes.astype("float32") * jnp.repeat(scales, inner // parts, axis=1)
    np.testing.assert_array_equal(product(x, codes, scales), product(x, w.astype(dtype), None))
    stack, of_groups = jnp.stack([codes, codes[::-1], codes]), jnp.stack([scales, scales[::-1], scales * 2])
    wide = stack.astype("float32") * jnp.repeat(of_groups, inner // parts, axis=2)
    counts = jnp.asarray([rows // 2, 0, 1], jnp.int32)
    grouped = jax.jit(lambda x, w, scales: grouped_linear(x, w, counts, dtype=jnp.float32, scales=scales))
    np.testing.assert_array_equal(grouped(x, stack, of_groups), grouped(x, wide.astype(dtype), None))


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("as_codes", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_is_the_same_whatever_stands_beside_it(dtype, as_codes):
    linear = choose_linear("cpu", dtype, "native").load().linear
    x, w = drawn(150, 96, dtype=dtype), drawn(203, 96, dtype=dtype)
    w = quantise(w) if as_codes else w
    rows = (slice(0, 1), slice(3, 5), slice(7, 20), slice(64, 131))
    whole, *parts = jax.jit(lambda x, w: [linear(part, w) for part in (x, *(x[some] for some in rows))])(x, w)
    for some, part in zip(rows, parts, strict=True):
        np.testing.assert_array_equal(np.asarray(part, np.float32), np.asarray(whole[some], np.float32))


@native_products
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dimensions_biases_and_types_are_those_of_the_contract(dtype):
    x, w, b = drawn(2, 3, 32, dtype=dtype), drawn(10, 32, dtype=dtype), drawn(10, dtype=dtype)
    for asked in (None, "float32", "bfloat16", "float16"):
        for bias in (None, b):
            got, expected = (f(x, w, bias, dtype=asked) for f in (linear, layers.linear))
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            got, expected = (np.asarray(y, np.float32) for y in (got, expected))
            bits = {"float32": 20, "float16": 10, "bfloat16": 7}[asked or dtype]
            np.testing.assert_allclose(got, expected, atol=2.0**-bits * float(np.abs(expected).max()))


@native_products
def test_other_types_are_refused():
    with pytest.raises(NotImplementedError, match="float16 times float16; native products have both in float32 or bf"):
        linear(drawn(1, 8, dtype="float16"), drawn(2, 8, dtype="float16"))
    with pytest.raises(NotImplementedError, match="float32 times bfloat16"):
        linear(drawn(1, 8), drawn(2, 8, dtype="bfloat16"))


def test_each_platform_gets_the_first_implementation_that_serves_it():
    assert tuple(i.name for i in LINEAR_IMPLEMENTATIONS) == IMPLEMENTATION_NAMES["linear"]
    assert choose_linear("gpu", "bfloat16").name == choose_linear("cpu", "float16").name == "xla"
    assert choose_linear("gpu", "bfloat16", compute_capability=(9, 0)).name == "hopper"
    assert choose_linear("gpu", "float16", compute_capability=(9, 0)).name == "xla"
    assert choose_linear("gpu", "bfloat16", compute_capability=(9, 0), num_devices=2).name == "xla"
    with pytest.raises(ValueError, match=r"'hopper': needs an NVIDIA GPU of compute capability 9\.0, this is gpu 8\.0"):
        choose_linear("gpu", "bfloat16", "hopper", compute_capability=(8, 0))
    assert choose_linear("cpu", "float32").name == ("xla" if no_native_products else "packed")
    assert choose_linear("cpu", "float32", "xla").load().linear is layers.linear
    with pytest.raises(ValueError, match=r"operators\.linear 'native': needs a CPU, this is gpu"):
        choose_linear("gpu", "float32", "native")
    with pytest.raises(
        ValueError, match=r"operators\.linear is 'mkl', must be auto or one of packed, mixed, native, hopper, xla"
    ):
        choose_linear("cpu", "float32", "mkl")


@native_products
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_rows_are_native_and_many_are_not(dtype):
    mixed = choose_linear("cpu", dtype, "mixed").load().linear
    for rows, is_native in ((1, True), (64, True), (65, False)):
        program = jax.jit(mixed).lower(drawn(rows, 32, dtype=dtype), drawn(8, 32, dtype=dtype)).as_text()
        assert ("ksana_linear" in program) == is_native


@pytest.mark.parametrize("features", [(), ("avx2",), ("fma", "avx")])
def test_a_cpu_without_wide_registers_is_served_by_xla(features, monkeypatch):
    monkeypatch.setattr("ksana_jax.core.processor.features", lambda: frozenset(features))
    assert choose_linear("cpu", "float32").name == "xla"


def of_groups(x, w, counts, scales=None):
    """The definition in float64."""
    wide = np.asarray(w, np.float64) if scales is None else np.asarray(w, np.float64) * np.asarray(scales)[..., None]
    group = np.repeat(np.arange(len(w)), counts)
    found = np.zeros((len(x), w.shape[1]))
    found[: len(group)] = np.einsum("tk,tnk->tn", np.asarray(x, np.float64)[: len(group)], wide[group])
    return found


COUNTS = {"one row": [0, 0, 1, 0], "some rows": [3, 0, 1, 70], "the last has none": [2, 5, 0, 0], "none": [0, 0, 0, 0]}


@native_products
@pytest.mark.usefixtures("each_machine")
@pytest.mark.parametrize("as_codes", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", COUNTS)
def test_products_of_groups_are_those_of_float64_and_rows_without_a_group_are_zero(name, dtype, as_codes):
    counts = COUNTS[name]
    x, w, scales = drawn(sum(counts) + 2, 40, dtype=dtype), drawn(4, 43, 40, dtype=dtype), None
    if as_codes:
        made = jax.vmap(quantise)(w)
        w, scales = made.codes, made.scales
    found = jax.jit(lambda *args: grouped_linear(*args, dtype=jnp.float32, scales=scales))(x, w, jnp.array(counts))
    np.testing.assert_allclose(found, of_groups(x, w, counts, scales), atol=4e-5)
    assert not found[sum(counts) :].any()
    b = drawn(len(x), 43, dtype=dtype)
    biased = grouped_linear(x, w, jnp.array(counts), b, scales=scales)
    assert biased.dtype == x.dtype
    np.testing.assert_array_equal(biased, (found + b).astype(dtype))


@native_products
def test_a_row_of_a_group_has_the_bits_of_a_product_with_its_matrix_alone():
    x, w, counts = drawn(76, 40), drawn(4, 43, 40), [3, 0, 1, 72]
    found = grouped_linear(x, w, jnp.array(counts))
    np.testing.assert_array_equal(found[1], linear(x[1:2], w[0])[0])
    np.testing.assert_array_equal(found[75], linear(x[75:], w[3])[0])


@native_products
def test_more_rows_than_there_are_cannot_be_asked_for():
    x, w = drawn(5, 40), drawn(3, 43, 40)
    found = grouped_linear(x, w, jnp.array([4, 2**30, -3]))
    np.testing.assert_allclose(found, of_groups(x, w, [4, 1, 0]), atol=4e-5)


@native_products
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"counts": jnp.zeros(2, jnp.int32)}, "counts"),
        ({"b": drawn(5, 42)}, "the bias"),
        ({"scales": drawn(3, 42), "w": jnp.zeros((3, 43, 40), jnp.int8)}, "scales"),
        ({"x": drawn(5, 39)}, "each matrix"),
    ],
)
def test_groups_whose_shapes_do_not_fit_are_refused(changed, said):
    given = {"x": drawn(5, 40), "w": drawn(3, 43, 40), "counts": jnp.zeros(3, jnp.int32)} | changed
    with pytest.raises(ValueError, match=said):
        grouped_linear(**given)
