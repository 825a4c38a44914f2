"""Measures how long the device takes for steps of decodes and of drafts, before an engine serves requests."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np

from ksana_jax.engine.engine import Engine
from ksana_jax.patterns import FAR
from ksana_jax.step.contract import Part, StepArrays, StepInput, StepShape
from ksana_jax.step.drafts import Drafts

# Tokens that each row has cached.
CONTEXT = 64
# Rounds of measurements, or fewer once they have taken so many seconds.
ROUNDS, LONGEST_S = 5, 3.0
# Steps of a shape in a round; the first one finds the data of another shape in the caches.
STEPS = 3


def decode_seconds(engine: Engine) -> dict[Part, float]:
    """Returns the seconds of steps of decodes, with and without drafts: of each the least, from submission to tokens.

    Rows read any blocks of the pool and write to none. No step of the engine may be under way.
    """
    buckets, width = engine.builder.buckets, engine.builder.buckets.widths[0]
    shapes = [buckets.shape(count, (), width) for count in buckets.decodes]
    # A method whose drafts may branch has one number for both kinds of steps, that of trees.
    shapes += [shape for shape in buckets.verification_shapes(width) if shape.tree == buckets.trees]
    steps = [_step(engine, shape) for shape in shapes]
    found: dict[Part, float] = {}
    began = time.perf_counter()
    # In rounds, because other work on the machine comes and goes.
    for _ in range(ROUNDS):
        for step in steps:
            [part] = step.shape.parts
            found[part] = min(_seconds(engine, step), found.get(part, math.inf))
        if time.perf_counter() - began > LONGEST_S:
            break
    return found


def _seconds(engine: Engine, step: StepInput) -> float:
    times = [time.perf_counter()]
    for _ in range(STEPS):
        engine.executor.submit(step).result()
        times.append(time.perf_counter())
    return min(after - before for before, after in itertools.pairwise(times[1:]))


def _step(engine: Engine, shape: StepShape) -> StepInput:
    """Returns a step of decodes, each after the same CONTEXT tokens of any texts."""
    [(count, tile)], layout = shape.parts, engine.scheduler.layout
    groups, size, nowhere = len(layout.groups), layout.block_size, engine.builder.num_blocks
    context = max(min(CONTEXT, engine.max_model_len, shape.table_width * size) - tile, 0)
    positions = np.tile(np.arange(context, context + tile, dtype=np.int32), count)
    starts = np.arange(shape.table_width, dtype=np.int32) * size
    tables = groups, count, shape.table_width
    arrays = StepArrays(
        tokens=np.zeros(count * tile, np.int32),
        positions=positions,
        cache_positions=np.tile(positions, (groups, 1)),
        slots=np.full((groups, count * tile), nowhere * size, np.int32),
        block_tables=np.zeros(tables, np.int32),
        block_starts=np.broadcast_to(np.where(starts < context + tile, starts, FAR), tables).astype(np.int32),
        sampled=np.resize(np.arange(count * tile, dtype=np.int32), shape.max_sampled),
    )
    if engine.builder.eviction is not None:
        arrays = arrays._replace(query_numbers=np.zeros((groups, count * tile), np.float32))
    if engine.builder.residual_groups is not None:
        arrays = arrays._replace(full_blocks=np.full((groups, shape.most_full(size)), nowhere, np.int32))
    if tile == 1:
        return StepInput(shape, arrays, engine.builder.buckets.num_sampled(count))
    acceptance = engine.builder.acceptance
    drafts = Drafts(
        np.zeros((count, tile - 1), np.int32),
        np.full(count, tile - 1, np.int32),
        rollback=np.float32(0) if acceptance == "bild" else None,
    )
    if shape.tree:
        drafts = drafts.with_parents()
        ancestors = np.pad(drafts.ancestry()[0], ((0, 0), (1, 0)), constant_values=1)
        arrays = arrays._replace(ancestors=ancestors.reshape(-1))
    return StepInput(shape, arrays, shape.max_sampled, drafts=drafts, acceptance=acceptance)
