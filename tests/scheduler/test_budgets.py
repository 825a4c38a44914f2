"""Limits of a step: tokens, tiles, and the blocks of running rows."""

import pytest

from ksana_jax.scheduler.step.types import TileGroup
from tests.expected import expect_reference
from tests.fakes import FULLY, SINKS, make_engine, run, step
from tests.scheduler.requests import add, watch_batches


@pytest.mark.parametrize("patterns", [FULLY, SINKS], ids=["full", "sinks"])
@pytest.mark.parametrize("num_blocks", [7, 64])
def test_every_scheduled_row_computes_at_least_one_token(patterns, num_blocks):
    # Class of bug: a zero-length query, once all of a prompt is found in the cache.
    engine = make_engine(patterns, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=8)
    batches = watch_batches(engine)
    # Prompts that fill blocks and budgets exactly, and others.
    requests = [add(engine, length, 9, seed=length) for length in (4, 8, 16, 1, 7, 12)]
    run(engine)
    assert all(count >= 1 for batch in batches for count in batch.values())
    assert all(1 <= sum(batch.values()) <= 8 for batch in batches)
    expect_reference(requests, patterns)


@pytest.mark.parametrize("budget", [1, 2, 5, 16, 100])
def test_text_does_not_depend_on_the_token_budget(budget):
    engine = make_engine(SINKS, max_num_batched_tokens=budget)
    requests = [add(engine, length, 10, seed=length) for length in (1, 5, 30, 17)]
    batches = watch_batches(engine)
    run(engine)
    assert max(sum(batch.values()) for batch in batches) <= budget
    assert max(len(batch) for batch in batches) <= min(4, budget)
    expect_reference(requests, SINKS)


def test_prompts_are_packed_into_one_step_and_join_rows_that_decode():
    engine = make_engine(max_num_batched_tokens=16, query_tile=4)
    batches = watch_batches(engine)
    first = add(engine, 4)
    step(engine)
    others = [add(engine, length, seed=length) for length in (4, 6)]
    step(engine)
    seqs = [r.completions[0].seq for r in (first, *others)]
    assert batches == [{seqs[0]: 4}, {seqs[0]: 1, seqs[1]: 4, seqs[2]: 6}]


def test_a_step_of_short_prompts_is_limited_by_its_tokens():
    engine = make_engine(num_blocks=300, max_num_seqs=80, max_num_batched_tokens=512, query_tile=32)
    requests = [add(engine, 8, 2, seed=seed) for seed in range(80)]
    batches = watch_batches(engine)
    step(engine)
    assert list(batches[0].values()) == [8] * 64
    assert engine.executor.steps[0].shape.parts == (TileGroup(80, 1), TileGroup(64, 8))
    run(engine)
    expect_reference(requests)


def test_long_prompts_fill_wide_tiles_and_short_ones_what_is_left():
    engine = make_engine(num_blocks=300, max_num_seqs=80, max_num_batched_tokens=64, query_tile=32)
    requests = [add(engine, length, 2, seed=length) for length in (33, 6, 30)]
    batches = watch_batches(engine)
    step(engine)
    # In tiles of 32 there is no room for 6 beside 33, in tiles of 8 there is; 30 would be cut to 16.
    assert list(batches[0].values()) == [33, 6]
    assert engine.executor.steps[0].shape.parts[-1] == TileGroup(8, 8)
    step(engine)
    assert list(batches[1].values()) == [1, 1, 30]
    assert engine.executor.steps[1].shape.parts[-1] == TileGroup(1, 32)
    run(engine)
    expect_reference(requests)


@pytest.mark.parametrize("budget", [1, 13])
def test_a_prompt_of_one_token_waits_for_no_tile(budget):
    engine = make_engine(max_num_batched_tokens=budget, query_tile=4)
    requests = [add(engine, length, 2, seed=length) for length in ((9, 2, 1) if budget > 1 else (1,))]
    batches = watch_batches(engine)
    step(engine)
    assert sorted(batches[0].values()) == ([1, 2, 9] if budget > 1 else [1])
    run(engine)
    expect_reference(requests)


def test_a_request_waits_until_its_first_chunk_fits_beside_those_that_run():
    engine = make_engine(num_blocks=6, block_size=4, max_num_batched_tokens=64)
    first, second = add(engine, 16, 2), add(engine, 12, 2)
    step(engine)
    assert second.completions[0].seq.row is None  # 3 blocks are needed, 2 are free
    run(engine)
    assert not engine.scheduler.num_preemptions
    expect_reference([first, second])


@pytest.mark.parametrize(("max_tokens", "starts"), [(9, False), (5, True)])
def test_a_request_waits_while_it_would_take_the_next_block_of_one_that_runs(max_tokens, starts):
    engine = make_engine(num_blocks=6, max_num_batched_tokens=64)
    first = add(engine, 8, max_tokens)
    step(engine)
    second = add(engine, 12, 2)  # 3 blocks of the 3 that are free when the first one has taken its third
    step(engine)
    assert (second.completions[0].seq.row is not None) == starts
    run(engine)
    assert not engine.scheduler.num_preemptions
    expect_reference([first, second])


def test_a_windowed_text_of_any_length_needs_no_more_blocks_than_its_window():
    engine = make_engine(SINKS, num_blocks=4, block_size=4, max_model_len=400, max_num_batched_tokens=7)
    request = add(engine, 300, 90)
    run(engine)
    assert max(r.blocks_in_use for r in engine.records) <= 1 + 2 + 1
    assert max(r.peak_blocks for r in engine.records) <= 4
    expect_reference([request], SINKS)
