"""Engines around an executor with the real interface, see `tests.fake_executor`, and how tests drive them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ksana_jax.core.config import EngineConfig, ModelConfig
from ksana_jax.core.layer_spec import LatentSpec
from ksana_jax.core.request import SamplingParams
from ksana_jax.devices.tuning import tuning
from ksana_jax.engine.build import build_engine
from ksana_jax.engine.engine import Engine
from ksana_jax.kv.engine_layout import make_layout
from ksana_jax.kv.prefix_index import PrefixIndex, Scope, sha256
from ksana_jax.scheduler.sequence import Rows
from ksana_jax.scheduler.speculative import draft_lengths, draws_trees
from ksana_jax.scheduler.step.builder import BatchBuilder
from ksana_jax.scheduler.step.ladders import all_shapes, make_buckets
from ksana_jax.scheduler.step.types import ScheduledBatch, StepInput
from tests.fake_executor import FakeExecutor
from tests.fake_network import FULLY, HEAD_DIM, VOCAB, Patterns
from tests.fake_network import SINKS as SINKS
from tests.fake_network import reference_hidden as reference_hidden
from tests.fake_network import reference_tokens as reference_tokens
from tests.fake_network import score as score
from tests.fake_network import two_layers as two_layers
from tests.fake_network import until_stop as until_stop


class CheckedBuilder(BatchBuilder):
    """Compares each step with the one that a new builder makes, from the rows alone.

    Attributes:
      num_following: steps that took over the block tables of the one before them.
    """

    num_following, _tables = 0, None

    def build(self, batch: ScheduledBatch, rows: Rows) -> tuple[StepInput, np.ndarray]:
        step, ends = super().build(batch, rows)
        self.num_following += step.arrays.block_tables is self._tables
        self._tables = step.arrays.block_tables
        expected, expected_ends = BatchBuilder(**_settings(self)).build(batch, rows)
        assert step.shape == expected.shape and np.array_equal(ends, expected_ends)
        counts = [(s.num_sampled, s.num_attended, s.num_logprobs) for s in (step, expected)]
        assert counts[0] == counts[1]
        pairs = [(step.arrays, expected.arrays), (step.sampling or (), expected.sampling or ())]
        pairs.append((step.arrays.states or (), expected.arrays.states or ()))
        pairs[0] = tuple(arrays._replace(states=None) for arrays in pairs[0])
        for made, other in pairs:
            for one, two in itertools.zip_longest(made, other):
                assert np.array_equal(one, two) and getattr(one, "dtype", None) == getattr(two, "dtype", None)
        return step, ends


def _settings(builder: BatchBuilder) -> dict[str, Any]:
    return {field.name: getattr(builder, field.name) for field in dataclasses.fields(builder) if field.init}


def make_engine(
    patterns: Patterns = FULLY,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    query_tile: int = 4,
    max_model_len: int = 64,
    policy: Any = "fcfs",
    async_scheduling: bool = False,
    num_scheduler_steps: int = 1,
    caching: bool = False,
    replacement: Any = "lru",
    preempt: Any = "auto",
    write: Any = "back",
    eos_ids: tuple[int, ...] = (),
    host_slots: int = 0,
    shared_rows: int = 0,
    scope: Scope | None = None,
    digest: Callable[[bytes], bytes] = sha256,
    stored: dict[str, Any] | None = None,
    latent: LatentSpec | None = None,
    speculative_config: dict[str, Any] | None = None,
    make_executor: Callable[..., FakeExecutor] = FakeExecutor,
    **memory: Any,
) -> Engine:
    """The real engine, scheduler and batch builder, which is checked, around a fake executor; a clock that ticks once a
    look.

    Args:
      caching, replacement, write: `EngineConfig`'s enable_prefix_caching, prefix_replacement, cache_write.
      host_slots: blocks of host memory.
      shared_rows: see `Buckets`.
      scope, digest: of the prefix index.
      stored: more fields of EngineConfig, such as kv_eviction, for an executor that knows them.
      latent: of the model, for a pool whose keys are its values.
      memory: arguments of KVMemory, such as disk.
    """
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        policy=policy,
        async_scheduling=async_scheduling,
        num_scheduler_steps=num_scheduler_steps,
        preempt=preempt,
        max_num_batched_tokens=max_num_batched_tokens,
        query_tile=query_tile,
        max_model_len=max_model_len,
        enable_prefix_caching=caching,
        prefix_replacement=replacement,
        cache_write=write,
        speculative_config=speculative_config,
        **stored or {},
    )
    sizes = {"num_layers": len(patterns), "num_kv_heads": 1, "head_dim": HEAD_DIM, "latent": latent}
    model = ModelConfig(vocab_size=VOCAB, eos_ids=eos_ids, **sizes)
    layout = make_layout(model, patterns, config, tuning("cpu").stored_as_bits) if stored else None
    executor = make_executor(
        patterns, num_blocks=num_blocks, block_size=block_size, host_slots=host_slots, layout=layout
    )
    buckets = make_buckets(config, "cpu", draft_lengths(config), draws_trees(config))
    buckets = dataclasses.replace(buckets, shared_rows=shared_rows)
    engine = build_engine(
        model,
        None,
        config,
        patterns=patterns,
        executor=executor,
        clock=itertools.count().__next__,
        buckets=buckets,
        **{"index": PrefixIndex(block_size, scope, digest), **memory},
    )
    engine.builder = CheckedBuilder(**{**_settings(engine.builder), "min_saved_tokens": 1})
    # What `LLM.warm_up` compiles.
    widest = executor.layout.table_width(max_model_len, max_num_batched_tokens)
    executor.shapes = set(all_shapes(buckets, widest))
    return engine


def asking(max_tokens: int = 8, **settings) -> SamplingParams:
    """Greedy and without text, unless told otherwise."""
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "detokenize": False, **settings})


def prompt_of(length: int, seed: int = 0) -> np.ndarray:
    """A prompt of random ids."""
    return np.random.default_rng((seed, length)).integers(0, VOCAB, length).astype(np.int32)


def run(engine: Engine, max_steps: int = 2000) -> int:
    """Steps until nothing is left, the books checked after each; returns how many.

    Raises:
      AssertionError: a check failed, or max_steps steps were not enough.
    """
    for steps in range(max_steps):
        if not engine.has_work:
            return steps
        step(engine)
    raise AssertionError(f"{len(engine.requests)} requests are unfinished after {max_steps} steps")


def step(engine: Engine) -> list:
    """One step; the books are checked, and what is free is filled with noise, so that no one can live on it."""
    reported = engine.step()
    check_books(engine)
    return reported


def check_books(engine: Engine) -> None:
    """Checks the books between two steps, and fills what is free with noise."""
    engine.scheduler.check()
    executor = engine.executor
    assert isinstance(executor, FakeExecutor)
    blocks = engine.scheduler.blocks
    free = (blocks.ref_count == 0) & ~blocks.kept
    for asked in engine.memory.moves.evictions:  # what stays is still to be moved out of emptied blocks
        free[asked.tables] = free[asked.targets] = False
    for saves in engine.memory.moves.all_saves:  # of rows that were swapped out, though no step followed
        free[list(saves.values())] = False
    executor.scramble(free)
    if engine.memory.host is not None:
        slots = engine.memory.host.pool
        executor.scramble_host((slots.ref_count == 0) & ~slots.kept)
