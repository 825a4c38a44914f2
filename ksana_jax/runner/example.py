"""A step of the engine as a pure function with example arguments, for `jax.make_jaxpr`, profilers and notebooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ksana_jax.core.patterns import FAR
from ksana_jax.runner.runner import Runner
from ksana_jax.scheduler.step.types import StepArrays, StepShape


class StepFunction(NamedTuple):
    """A step as a pure function, with arguments to call it with: `jax.jit(step.function)(*step.arguments)`.

    Attributes:
      function: (params, cache, arrays, patterns) -> (cache, hidden [T, D], hidden of the sampled tokens [J, D]); one
        program on every platform, without sampling. `ksana_jax.models.logits` makes scores of the hidden states.
      arguments: weights and KV pool of the engine, the arrays of an example step, and the patterns of the layers. The
        pool is the engine's own and not a copy: the engine's next step deletes it, and so does a call that donates it.
      shape: sizes of the step.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    shape: StepShape


def step_function(runner: Runner, shape: StepShape, context: int | None = None) -> StepFunction:
    """Returns the step of one shape with an example of its arguments; see `LLM.step_function`."""
    params, cache, shapes, patterns = runner.step_arguments(shape)
    block_size, num_blocks = runner.layout.block_size, cache.num_blocks
    room = shape.table_width * block_size
    longest = max(part.width for part in shape.parts)
    if context is None:  # as long as rows can be that share no block
        context = max(min(room, num_blocks // shape.num_tiles * block_size), longest)
    if not longest <= context <= room:
        raise ValueError(f"context is {context:,} tokens, must be from {longest:,}, a tile, to {room:,}, a block table")
    arrays = example_arrays(shapes, shape, context, block_size, num_blocks)
    if runner.embeds_on_host:
        arrays = arrays._replace(tokens=runner.params.embed[arrays.tokens])
    return StepFunction(runner.pure_step(shape), (params, cache, arrays, patterns), shape)


def example_arrays(shapes: StepArrays, shape: StepShape, context: int, block_size: int, num_blocks: int) -> StepArrays:
    """Fills a step's arrays: each tile belongs to a separate row, whose sequence ends with the tile's last token."""
    _, tiles, width = shapes.block_tables.shape
    counts = [np.full(part.count, part.width) for part in shape.parts]
    per_tile = np.concatenate(counts)
    row = np.repeat(np.arange(tiles), per_tile)
    nth = np.arange(shape.num_tokens) - np.repeat(np.cumsum(per_tile) - per_tile, per_tile)
    positions = (context - np.repeat(per_tile, per_tile) + nth).astype(np.int32)
    used = -(-context // block_size)
    tables = (np.arange(tiles)[:, None] * used + np.arange(width)) % num_blocks
    starts = np.where(np.arange(width) < used, np.arange(width) * block_size, FAR)
    slots = tables[row, positions // block_size] * block_size + positions % block_size
    last = np.cumsum(per_tile) - 1

    def of_groups(x: np.ndarray, like: Any) -> np.ndarray:
        return np.broadcast_to(x, like.shape).astype(np.int32)

    filled = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes)._replace(
        tokens=np.zeros(shape.num_tokens, np.int32),
        positions=positions,
        cache_positions=of_groups(positions, shapes.cache_positions),
        slots=of_groups(slots, shapes.slots),
        block_tables=of_groups(tables, shapes.block_tables),
        block_starts=of_groups(starts, shapes.block_starts),
        sampled=np.resize(last, shape.max_sampled).astype(np.int32),
    )
    if filled.shared_starts is not None:  # nothing is shared
        filled = filled._replace(shared_starts=np.full_like(filled.shared_starts, FAR))
    if filled.full_blocks is not None:  # no block becomes full
        filled = filled._replace(full_blocks=np.full_like(filled.full_blocks, num_blocks))
    return filled
