"""Native products with matrices in blocks, against float64, and layers that have them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.models.block_matrix import PackedBlocks
from ksana_jax.models.params import stated, weights_of
from ksana_jax.native.grouped import grouped_blocks
from ksana_jax.native.operators import Weights, project
from ksana_jax.ops.linear import choose_linear
from ksana_jax.ops.weight_packing import pack, unpack
from tests.machine import native_products
from tests.models.blocks import OF_FORMS, block_matrix, fitting
from tests.native.test_layer import CONFIGS, Definition, operators, weights

pytestmark = native_products


def rounded(x: np.ndarray) -> np.ndarray:
    """Rounds rows [T, K] as products do: codes of -127 to 127 times a scale for each 32."""
    blocks = np.asarray(x, np.float32).reshape(len(x), -1, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    factors = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    return (np.round(blocks * factors) * np.float64(largest / 127)).reshape(x.shape)


@pytest.mark.parametrize("kind", OF_FORMS)
@pytest.mark.parametrize(
    ("rows", "columns", "inner", "dtype"), [(1, 1, 32, "float32"), (9, 70, 64, "bfloat16"), (67, 130, 1120, "float32")]
)
def test_products_are_those_of_float64_with_rounded_rows(rows, columns, inner, kind, dtype):
    inner = fitting(kind, inner)
    w, numbers = block_matrix(kind, columns, inner, dtype)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, inner)), dtype).at[rows // 2, :32].set(0)
    b = jnp.asarray(np.random.default_rng(2).normal(size=columns), dtype)
    product = jax.jit(lambda x: choose_linear("cpu", dtype, "packed").load().linear(x, pack(w), b, dtype=jnp.float32))
    found, exact = np.asarray(product(x)), np.asarray(x, np.float64)
    codes = rounded(exact)
    wanted = codes @ numbers.T.astype(np.float64) + np.asarray(b, np.float64)
    largest = np.abs(codes) @ np.abs(numbers).T.astype(np.float64) + 1
    assert (np.abs(found - wanted) <= 3e-6 * largest).all()
    # Rounding moves a number of x by half a step at most.
    steps = np.abs(exact).reshape(rows, -1, 32).max(-1) / 127
    bound = np.repeat(steps / 2, 32, axis=1) @ np.abs(numbers).T
    unrounded = exact @ numbers.T.astype(np.float64) + np.asarray(b, np.float64)
    assert (np.abs(found - unrounded) <= bound * 1.001 + 3e-6 * largest).all()
    for some in (slice(0, 1), slice(rows // 2, rows), slice(rows // 3, rows // 3 + 3)):
        np.testing.assert_array_equal(product(x[some]), found[some])


COUNTS = {"one row": [0, 0, 1, 0], "some rows": [3, 0, 1, 70], "none": [0, 0, 0, 0], "too many": [4, 2**30, -3, 1]}


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "float32") for kind in OF_FORMS), ("Q4_1", "bfloat16")])
def test_products_of_groups_have_the_bits_of_products_with_each_matrix_alone(kind, dtype):
    stack = [pack(block_matrix(kind, 70, fitting(kind, 96), dtype, seed=seed)[0]) for seed in range(4)]
    w = jax.tree.map(lambda *parts: jnp.stack(parts), *stack)
    assert w.shape == (4, *stack[0].shape) and pack(unpack(w)).data.shape == w.data.shape
    product = jax.jit(lambda *args: grouped_blocks(*args, dtype=jnp.float32))
    for counts in COUNTS.values():
        x = jnp.asarray(np.random.default_rng(1).normal(size=(76, w.shape[2])), dtype)
        found, row = product(x, w, jnp.array(counts)), 0
        for one, count in zip(stack, counts, strict=True):
            end = min(row + max(count, 0), len(x))
            if end > row:
                wanted = project(x[row:end], [Weights.of(one, None)], dtype=jnp.float32)[0]
                np.testing.assert_array_equal(found[row:end], wanted)
            row = end
        assert not found[row:].any()
    b = jnp.asarray(np.random.default_rng(2).normal(size=(76, 70)), dtype)
    biased = grouped_blocks(x, w, jnp.array(counts), b)
    np.testing.assert_array_equal(biased, (found + b).astype(dtype))


def test_groups_whose_shapes_do_not_fit_are_refused():
    w = jax.tree.map(lambda part: jnp.stack([part] * 3), pack(block_matrix("Q4_1", 70, 64)[0]))
    x, counts = jnp.zeros((2, 64)), jnp.zeros(3, jnp.int32)
    for given, said in (
        ((x, w, counts[1:]), "counts"),
        ((x[:, :32], w, counts), "each matrix"),
        ((x, w, counts, jnp.zeros((2, 64))), "the bias"),
        ((x, w.replace(data=w.data[:, :1]), counts), "words of each matrix"),
        ((x, w.replace(data=w.data[:, :, 1:]), counts), "words of each matrix"),
    ):
        with pytest.raises(ValueError, match=f"{said} .*must be"):
            grouped_blocks(*given)


@pytest.mark.parametrize("kind", OF_FORMS)
def test_what_is_not_finite_is_not_hidden(kind):
    w, _ = block_matrix(kind, 5, 256)
    x = jnp.ones((3, 256)).at[0, 1].set(jnp.inf).at[1, 40].set(jnp.nan)
    found = np.isfinite(project(x, [Weights.of(pack(w), None)])[0])
    assert not found[:2].any() and found[2].all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_those_of_float64_and_rows_do_not_depend_on_each_other(name, dtype):
    config = dataclasses.replace(CONFIGS[name], d_model=256, num_heads=4, head_dim=64, d_ff=256)
    [p], [spec] = weights(config, dtype).layers, config.layers
    kinds, plain, blocks = iter(OF_FORMS[list(CONFIGS).index(name) :]), {}, {}
    for field, w in weights_of(p).items():
        if stated(field, "a test").quantises:
            made, numbers = block_matrix(next(kinds), *w.shape, dtype)
            plain[field], blocks[field] = numbers, pack(made)
    x, attended = (jnp.asarray(np.random.default_rng(i).normal(size=(40, 256)), dtype) for i in range(2))
    packed = p.replace(**blocks)
    heads = jax.jit(lambda x: operators(dtype).queries_keys_values(x, packed, spec))
    rest = jax.jit(lambda x, a: operators(dtype).after_attention(x, a.reshape(-1, 4, 64), packed, spec))
    found = *heads(x), rest(x, attended)
    definition = Definition(p.replace(**plain), config)
    wanted = (
        *definition.heads(np.asarray(x, np.float64)),
        definition.rest(*(np.asarray(a, np.float64) for a in (x, attended))),
    )
    for a, b in zip(found, wanted, strict=True):
        # Rounding rows: the deviation of a step of 1/127 of the largest of 32 numbers, several times in a row.
        assert np.sqrt(np.mean((np.asarray(a, np.float64) - b) ** 2)) < 2e-2 * np.sqrt(np.mean(b**2))
    for rows in (slice(0, 1), slice(5, 12)):
        for a, b in zip((*heads(x[rows]), rest(x[rows], attended[rows])), found, strict=True):
            np.testing.assert_array_equal(a, b[rows])
    assert "ksana_rest_of_layer" in rest.lower(x, attended).as_text()
    assert all(isinstance(w, PackedBlocks) for w in blocks.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_with_rows_as_they_are_unpack_the_matrix(dtype):
    w, numbers = block_matrix("Q4_1", 70, 64, dtype)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(9, 64)), dtype)
    linear = jax.jit(choose_linear("cpu", dtype, "native").load().linear)
    found = np.asarray(linear(x, w))
    np.testing.assert_array_equal(found, linear(x, jnp.asarray(numbers, dtype)))
    np.testing.assert_array_equal(found[3:4], linear(x[3:4], w))


def test_arrays_that_do_not_belong_together_are_refused():
    w = Weights.of(pack(block_matrix("Q4_1", 70, 64)[0]), None)
    x = jnp.zeros((2, 64))
    changes = {"words": w.words[:1]}, {"words": w.words[:, :-1]}, {"num_rows": 200}, {"width": 32}
    for changed in (*changes, {"form": w.form._replace(scales="float32")}):
        with pytest.raises(ValueError, match="must be"):
            project(x, [w._replace(**changed)])
    for changed, said in (({"bits": 7}, "codes of 7 bits in groups of 32"), ({"group": 64}, "4 bits in groups of 64")):
        with pytest.raises(NotImplementedError, match=said):
            project(x, [w._replace(form=w.form._replace(**changed))])
    dense = Weights(jnp.zeros((1, 64, 64, 1)), 64)
    with pytest.raises(ValueError, match="rounded by blocks and not at all"):
        project(x, [w, dense])
