"""Live blocks of a step: the pool's content for the next token of a text, whether or not the text ends."""

import numpy as np
import pytest

from ksana_jax.core.patterns import FULL, AttentionPattern
from tests.fake_pool import StoringExecutor
from tests.fake_sealed_pool import SealingExecutor
from tests.fakes import asking, make_engine, prompt_of, run, two_layers

NUM_TOKENS = 37
BLOCK_SIZE = 4
WINDOW = AttentionPattern(window=10)
SINKS = AttentionPattern(window=10, num_sinks=5)


def evicting(**settings):
    chosen = {"method": "h2o", "budget": 12, "prompts": "streamed"} | settings
    return {"stored": {"kv_eviction": chosen}, "make_executor": StoringExecutor}


def sealed(**settings):
    chosen = {"k": "kivi4", "v": "kivi4", "residual_dtype": "f32", "residual": 6} | settings
    return {"stored": {"kv_cache_dtype": chosen}, "make_executor": SealingExecutor}


# Patterns of two layers, settings of an engine, and the blocks that it holds of 37 tokens for the 38th.
HELD = {
    "full": (two_layers(FULL), {}, 10),
    # Query 37 attends to 28 to 36 and itself; tokens 0 to 4 are sinks.
    "window": (two_layers(WINDOW), {}, 3),
    "sinks": (two_layers(SINKS), {}, 2 + 3),
    # Tokens 34 to 36 are in the window; 0, 16 and 32 stay, the last in the block of 34.
    "global": (two_layers(AttentionPattern(window=4, global_every=16)), {}, 2 + 2),
    "layers that differ": ((FULL, WINDOW), {}, 10 + 3),
    "prefix cache": (two_layers(WINDOW), {"caching": True}, 3),
    "asynchronous": (two_layers(SINKS), {"async_scheduling": True}, 2 + 3),
    "several steps at once": (two_layers(SINKS), {"num_scheduler_steps": 4}, 2 + 3),
    "int8": (two_layers(FULL), {"stored": {"kv_cache_dtype": "int8"}, "make_executor": StoringExecutor}, 10),
    "evicting": (two_layers(FULL), evicting(), 3),
    # 25 tokens exceed the budget; they go in intervals of 8, so 32 are gone.
    "evicting by 8": (two_layers(FULL), evicting(interval=8), 2),
    "evicting once": (two_layers(FULL), evicting(budget=0.2, prompts="whole"), 2),
    # Codes of all tokens, and for keys and values of each layer, exactly, the two blocks with tokens 32 to 36.
    "sealed": (two_layers(FULL), sealed(), 10 + 4 * 2),
    "sealed, first exact": (two_layers(FULL), sealed(first=5), 10 + 4 * (2 + 2)),
    "sealed, window": (two_layers(WINDOW), sealed(), 3 + 4 * 2),
    "sealed, no residual": (two_layers(WINDOW), sealed(residual=0), 3 + 4 * 1),
}


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("name", HELD)
def test_a_text_holds_the_same_blocks_at_its_end_whatever_the_chunk(name, chunk):
    patterns, settings, held = HELD[name]
    engine = engine_of(patterns, chunk, settings)
    engine.add_request(prompt_of(NUM_TOKENS), asking(1))
    run(engine)
    assert engine.records[-1].live_blocks == held
    assert engine.records[-1].blocks_in_use == 0


@pytest.mark.parametrize("name", HELD)
def test_live_blocks_are_those_that_a_text_holds_when_it_goes_on(name):
    patterns, settings, held = HELD[name]
    engine = engine_of(patterns, 16, settings)
    engine.add_request(prompt_of(NUM_TOKENS), asking(2, ignore_eos=True))
    run(engine)
    *_, last, _ = engine.records
    assert np.sum([r.num_tokens for r in engine.records[:-1]]) == NUM_TOKENS
    assert last.live_blocks == last.blocks_in_use == held


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("name", ["full", "window", "int8", "sealed", "sealed, first exact", "sealed, window"])
def test_bytes_per_token_are_those_of_live_blocks_over_the_tokens_in_them(name, chunk):
    patterns, settings, _ = HELD[name]
    engine = engine_of(patterns, chunk, settings)
    engine.add_request(prompt_of(36), asking(1))  # whole blocks
    run(engine)
    layout = engine.scheduler.layout
    held = engine.records[-1].live_blocks * layout.block_bytes
    tokens = 12 if "window" in name else 36  # query 36 attends to 27 to 35, in three blocks
    assert layout.bytes_per_token(36) * tokens == pytest.approx(held, rel=1e-12)
    assert (layout.bytes_per_token(36) > layout.token_bytes) == ("sealed" in name)


def engine_of(patterns, chunk, settings):
    return make_engine(
        patterns,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=chunk,
        query_tile=min(chunk, 4),
        max_num_seqs=min(chunk, 4),
        num_blocks=64,
        **settings,
    )
