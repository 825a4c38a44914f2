"""Shapes of a step's arrays, for which programs are compiled."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ksana_jax.kv.layout import KVLayout
from ksana_jax.step.contract import StepArrays, StepShape


def array_shapes(shape: StepShape, layout: KVLayout) -> StepArrays:
    """Returns the shapes of the arrays of a step, whose tokens are ids."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    groups, tokens, width = len(layout.groups), shape.num_tokens, shape.table_width
    tables = ints((groups, shape.num_tiles, width))
    arrays = StepArrays(
        ints((tokens,)),
        ints((tokens,)),
        ints((groups, tokens)),
        ints((groups, tokens)),
        tables,
        tables,
        ints((shape.max_sampled,)),
    )
    if shape.shared_rows:
        shared = ints((groups, shape.num_groups, width))
        arrays = arrays._replace(shared_tables=shared, shared_starts=shared)
    if layout.eviction is not None and layout.eviction.method.tells_queries_apart:
        arrays = arrays._replace(query_numbers=jax.ShapeDtypeStruct((groups, tokens), jnp.float32))
    if layout.sealed is not None:
        arrays = arrays._replace(full_blocks=ints((groups, shape.most_full(layout.block_size))))
    if shape.tree:
        arrays = arrays._replace(ancestors=ints((tokens,)))
    return arrays
