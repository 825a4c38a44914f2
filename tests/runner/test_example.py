"""The step as a pure function: its results, and that jax's tools take it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import StepShape, TileGroup
from ksana_jax.models.dense import dense_attend
from ksana_jax.models.transformer import forward
from ksana_jax.scheduler.step.ladders import all_shapes
from tests.engine.small import make_llm, model


def test_the_step_function_computes_the_model_on_its_example():
    llm, (config, params) = make_llm(), model()
    step = llm.step_function(StepShape((TileGroup(1, 16),), table_width=4, max_sampled=4), context=16)
    tokens = np.random.default_rng(0).integers(2, 64, 16).astype(np.int32)
    weights, cache, arrays, patterns = step.arguments
    # XLA writes keys and values into a copy of the pool: the function is pure.
    _, hidden, sampled = jax.jit(step.function)(weights, cache, arrays._replace(tokens=tokens), patterns)
    expected, _ = forward(params, jnp.array(tokens), dense_attend(params, 16, config=config), None, config=config)
    # float32 in two orders of summation, through two layers
    np.testing.assert_allclose(hidden, expected, atol=1e-4)
    np.testing.assert_array_equal(sampled, np.repeat(hidden[-1:], 4, axis=0))
    assert llm.runner.cache is cache and not any(leaf.is_deleted() for leaf in cache.leaves.values())


def test_the_example_of_every_shape_is_one_that_the_engine_could_be_given():
    llm = make_llm()
    for shape in all_shapes(llm.engine.builder.buckets):
        step = llm.step_function(shape)
        lowered = llm.runner.step_arguments(shape)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), step.arguments) == jax.tree.map(
            lambda x: (x.shape, x.dtype), lowered
        )
        arrays = step.arguments[2]
        assert arrays.positions.min() >= 0 and len(set(arrays.slots[0].tolist())) == shape.num_tokens
        new_cache, hidden, _ = jax.eval_shape(step.function, *step.arguments)
        assert hidden.shape == (shape.num_tokens, 32) and new_cache.num_blocks == llm.num_blocks


def test_a_decode_of_all_rows_is_the_default_and_jax_traces_it():
    step = make_llm().step_function()
    assert step.shape.parts == (TileGroup(4, 1),)
    assert len(jax.make_jaxpr(step.function)(*step.arguments).jaxpr.eqns) > 10


@pytest.mark.parametrize("context", [0, 65])
def test_rows_that_block_tables_do_not_hold_are_refused(context):
    with pytest.raises(ValueError, match=f"context is {context} tokens, must be from 1, a tile, to 64, a block table"):
        make_llm().step_function(StepShape((TileGroup(2, 1),), 4, 2), context=context)


def test_rows_beyond_max_model_len_are_refused_where_the_shape_is_chosen():
    llm = make_llm()
    longest = llm.engine.max_model_len
    with pytest.raises(ValueError, match=f"context is {longest + 1:,} tokens, max_model_len is {longest:,}"):
        llm.step_function(context=longest + 1)
    assert llm.step_function(context=longest).shape.table_width * llm.config.block_size >= longest
