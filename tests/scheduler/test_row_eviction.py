"""Rows that share cached blocks evict: their kept tokens move to new blocks, and cached blocks stay whole."""

import dataclasses

import numpy as np
import pytest

from tests.fake_pool import StoringExecutor
from tests.fakes import asking, make_engine, prompt_of, run, step

ONCE = {"method": "knorm", "budget": 20, "recent": 2, "prompts": "once"}
TEXT = prompt_of(32)


def engine_of(caching=True, **settings):
    settings = {"num_blocks": 40, "max_num_batched_tokens": 64, **settings}
    return make_engine(caching=caching, stored={"kv_eviction": ONCE}, make_executor=StoringExecutor, **settings)


def prompts(count):
    """Texts with 32 shared tokens, and one or more separate ones."""
    return [np.append(TEXT, prompt_of(1 + i, seed=i + 1)) for i in range(count)]


def texts_of(engine, asked, count=6):
    requests = [engine.add_request(prompt, asking(count)) for prompt in asked]
    run(engine)
    return [request.completions[0].token_ids for request in requests]


def test_a_cached_text_is_found_whole_after_rows_have_evicted_from_it():
    engine = engine_of()
    expected = texts_of(engine_of(caching=False), prompts(4))
    for _ in range(2):
        assert texts_of(engine, prompts(4)) == expected
    counters = engine.memory.counters
    # Eight blocks of four; the first of the requests computes them, and the others wait for that.
    assert counters.hit_tokens == 7 * 32 and counters.evicted == 8 * 16


@pytest.mark.parametrize("host_slots", [0, 4])
def test_a_row_without_room_for_what_it_keeps_gives_up_cached_blocks_or_leaves(host_slots):
    expected = texts_of(engine_of(caching=False), prompts(4))
    left = []
    for num_blocks in range(10, 24):
        engine = engine_of(num_blocks=num_blocks, host_slots=host_slots, preempt="recompute", write="through")
        scheduler = engine.scheduler

        def leave(row, scheduler=scheduler):
            left.append(row)
            assert len(scheduler.order) > 1, "a row that is alone always has room"
            scheduler._preempt(row)

        scheduler.eviction = dataclasses.replace(scheduler.eviction, preempt=leave)
        assert texts_of(engine, prompts(4)) == expected
    assert left


def test_a_step_is_scheduled_ahead_unless_a_row_still_has_cached_blocks_to_leave():
    engine = engine_of(async_scheduling=True)
    engine.add_request(prompts(1)[0], asking(12))
    step(engine)
    assert engine.num_steps_under_way == 0, "the prompt is complete, and evicts from cached blocks"
    step(engine)
    assert engine.num_steps_under_way == 1
    run(engine)
