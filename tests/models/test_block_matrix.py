"""Matrices in blocks: their numbers, looked up rows, packing and products by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.gguf_file import TYPES
from ksana_jax.loading.gguf_blocks import FLOATS
from ksana_jax.models.block_matrix import FORMS, BlockMatrix
from ksana_jax.models.layers import linear
from ksana_jax.models.operators import XLA_OPERATORS
from ksana_jax.ops.weight_packing import can_pack, pack, unpack
from tests.models.blocks import KINDS, OF_FORMS, block_matrix, fitting


def test_every_type_of_blocks_has_a_form():
    of_gguf = {name for name in FORMS if not name.startswith(("int", "fp8"))}  # the others are of quantised safetensors
    assert set(KINDS) == of_gguf == {kind.name for kind in TYPES.values()} - FLOATS.keys()


@pytest.mark.parametrize(("rows", "kind"), [*((70, kind) for kind in KINDS), (3, "Q4_1"), (64, "Q6_K")])
def test_numbers_are_those_of_the_decoder_bit_for_bit_packed_or_not(kind, rows):
    w, wanted = block_matrix(kind, rows, fitting(kind, 96))
    assert w.shape == wanted.shape and can_pack(w)
    packed = pack(w)
    for form in (w, packed):
        found = np.asarray(jax.jit(lambda form: form.numbers())(form))
        np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    assert packed.shape == w.shape
    back = unpack(packed)
    assert jax.tree.structure(back) == jax.tree.structure(w)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(w), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", OF_FORMS)
def test_a_stack_of_matrices_has_their_numbers_packed_or_not(kind):
    each = [block_matrix(kind, 70, fitting(kind, 96), seed=seed) for seed in range(3)]
    w = jax.tree.map(lambda *parts: jnp.stack(parts), *[one for one, _ in each])
    packed = pack(w)
    assert w.shape == packed.shape == (3, *each[0][0].shape)
    assert jax.tree.map(jnp.shape, w) == jax.tree.map(lambda a: a.shape, BlockMatrix.shapes(w.shape, kind, "float32"))
    for form in (w, packed):
        for index, (_, wanted) in enumerate(each):
            np.testing.assert_array_equal(jax.tree.map(lambda part: part[index], form).numbers(), wanted)  # noqa: B023
    jax.tree.map(np.testing.assert_array_equal, unpack(packed), w)


@pytest.mark.parametrize("kind", OF_FORMS)
def test_rows_of_an_embedding_are_looked_up_in_the_dtype_of_activations(kind):
    w, numbers = block_matrix(kind, 70, fitting(kind, 64), "bfloat16")
    tokens = jnp.array([[69, 0, 64], [63, 1, 69]])
    wanted = jnp.asarray(numbers, jnp.bfloat16)[tokens]
    for form in (w, pack(w)):
        np.testing.assert_array_equal(XLA_OPERATORS.embed(form, tokens), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q2_K"])
def test_products_by_xla_are_those_with_the_dequantised_matrix(kind, dtype):
    w, numbers = block_matrix(kind, 40, fitting(kind, 96), dtype)
    rng = np.random.default_rng(1)
    x, b = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((2, 5, w.shape[1]), (40,)))
    found, wanted = (linear(x, m, b, dtype=jnp.float32) for m in (w, jnp.asarray(numbers, dtype)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", OF_FORMS)
def test_shapes_need_no_weights(kind):
    w, _ = block_matrix(kind, 40, fitting(kind, 96))
    shapes = BlockMatrix.shapes(w.shape, kind, "float32")
    assert jax.tree.map(lambda a: (a.shape, a.dtype), w) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
