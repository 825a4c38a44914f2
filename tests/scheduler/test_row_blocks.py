"""Blocks of rows in several groups of layers, some of which keep the same positions."""

import numpy as np

from ksana_jax.core.patterns import FULL, AttentionPattern
from tests.expected import expect_reference
from tests.fakes import asking, make_engine, prompt_of, step

WINDOW, SIZE = 6, 4
SLIDING = AttentionPattern(window=WINDOW, num_sinks=1, sink_position="absolute")
# Three groups of one layer: two that slide, one that sees everything.
PATTERNS = (SLIDING, FULL, SLIDING)


def test_groups_that_slide_alike_return_their_blocks_in_the_same_step_and_texts_stay_right():
    engine = make_engine(PATTERNS, num_blocks=34, block_size=SIZE, caching=True, host_slots=40, preempt="swap")
    assert [group.layers for group in engine.scheduler.layout.groups] == [(0,), (2,), (1,)]
    shared = prompt_of(13)
    prompts = [np.append(shared, prompt_of(length, 1)) for length in (2, 9, 20, 5, 14, 1)]
    requests = [engine.add_request(prompt, asking(18)) for prompt in prompts]
    rows, held = engine.scheduler.rows, []
    while engine.has_work:
        step(engine)
        held.append(rows.num_blocks[:, engine.scheduler.order])
        for first, second, full in held[-1].T.tolist():
            # A block of sinks, a window that touches a block more than it fills, and a chunk that was just computed.
            assert first == second <= min(full, 1 + WINDOW // SIZE + 2 + 16 // SIZE)
    assert max(full - first for first, _, full in np.concatenate(held, axis=1).T.tolist()) >= 4
    assert engine.memory.counters.hit_tokens and engine.scheduler.num_preemptions
    expect_reference(requests, PATTERNS)
