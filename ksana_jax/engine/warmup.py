"""Compiles ahead of time what the requests of an engine can need."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from ksana_jax.core.processor import num_cores
from ksana_jax.core.request import SamplingParams
from ksana_jax.devices.tuning import tuning
from ksana_jax.engine.engine import Engine
from ksana_jax.runner.keys import keys_for
from ksana_jax.scheduler.step.ladders import plain_shapes, verification_shapes


def warm_up(engine: Engine, max_len: int | None, asked: Seq[SamplingParams]) -> None:
    """Compiles every step that sequences of up to max_len tokens can need; see `LLM.warm_up`."""
    runner: Any = engine.executor
    config, buckets = engine.config, engine.builder.buckets
    width = engine.scheduler.layout.table_width(max_len or engine.max_model_len, config.max_num_batched_tokens)
    # XLA:CPU takes 200 MB for a program, which a planned memory has once.
    at_once = tuning(runner.platform).compiles_on_one_core and config.memory_fraction is None
    workers = num_cores() if at_once else 1
    loops = {1} if runner.chooses_in_step else set()
    if config.num_scheduler_steps > 1 and not runner.embeds_on_host:
        loops.add(config.num_scheduler_steps)
    shapes, verifying = plain_shapes(buckets, width), verification_shapes(buckets, width)
    speculation, rule = engine.scheduler.speculation, engine.builder.acceptance
    drawn = () if speculation is None else speculation.proposer.drawn_shapes
    vocab_size = engine.model.vocab_size
    keys = keys_for(shapes, buckets.decodes, asked, loops, vocab_size, verifying, rule, drawn)
    widest = max(shape.table_width for shape in shapes)
    moves = engine.memory.host is not None or any(p.num_sequences > 1 for p in asked)
    runner.compile(keys, workers, table_width=widest, moves=moves)
    if speculation is not None:
        speculation.proposer.warm_up(widest, any(not p.greedy for p in asked), workers)
