"""Every attention pattern through the paged engine, against the literal dense definition in float64."""

import itertools
import math

import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core.config import ModelConfig
from ksana_jax.models.params import init_params
from ksana_jax.ops import attention
from tests.engine.small import expect_dense
from tests.patterns import PATTERNS, WINDOW
from tests.reference import reference_logprobs
from tests.soak import soak_unless

pytestmark = pytest.mark.usefixtures("few_shapes")

TEXT = 6 * WINDOW
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}


def make_model(heads: str = "GQA"):
    num_heads, num_kv_heads = HEADS[heads]
    config = ModelConfig(
        vocab_size=61,
        d_model=32,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        d_ff=48,
        max_position=256,
    )
    return config, init_params(config, seed=3, std=0.4)


@pytest.fixture(scope="module", autouse=True)
def several_pieces():
    """Reads these short texts in several pieces all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "PIECE_TOKENS", 24)
        yield


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(7)
    return [rng.integers(0, 61, n) for n in (1, 2, 17, TEXT)]


@pytest.fixture(scope="module")
def engines():
    made = {}

    def make(heads: str, chunk: int, block_size: int) -> LLM:
        key = heads, chunk, block_size
        if key not in made:
            config, params = make_model(heads)
            made[key] = LLM.from_params(
                config,
                params,
                block_size=block_size,
                max_num_batched_tokens=chunk,
                max_num_seqs=3,
                query_tile=8,
                max_model_len=128,
                max_repositioned_sinks=16,
            )
        return made[key]

    return make


@pytest.mark.parametrize(
    ("chunk", "block_size"),
    soak_unless(lambda pair: pair in ((7, 16), (16, 8)), itertools.product((1, 7, 16, 128), (8, 16))),
)
def test_every_pattern_equals_its_dense_definition_for_every_chunk_and_block_size(engines, texts, chunk, block_size):
    config, params = make_model("GQA")
    llm = engines("GQA", chunk, block_size)
    for pattern in PATTERNS.values():
        expect_dense(llm, config, params, texts, pattern)


@pytest.mark.parametrize("heads", soak_unless(lambda heads: heads == "MQA", ["MHA", "MQA"]))
def test_every_pattern_equals_its_dense_definition_for_other_head_counts(engines, texts, heads):
    config, params = make_model(heads)
    for pattern in PATTERNS.values():
        expect_dense(engines(heads, 16, 8), config, params, texts, pattern)


def test_layers_can_have_different_patterns(engines, texts):
    config, params = make_model("GQA")
    mixed = [PATTERNS["StreamingLLM"], PATTERNS["dilated"]]
    expect_dense(engines("GQA", 16, 8), config, params, texts, mixed)


def test_a_sweep_over_patterns_compiles_nothing_new(engines, texts):
    llm = engines("GQA", 16, 8)
    config, params = make_model("GQA")
    expect_dense(llm, config, params, texts, AttentionPattern(window=WINDOW, num_sinks=2, sink_position="cache"))
    before = llm.num_compilations
    for window in (WINDOW - 3, WINDOW - 1):
        for sinks in (0, 1, 5):
            for position in ("absolute", "cache", "ceiling"):
                expect_dense(
                    llm, config, params, texts, AttentionPattern(window=window, num_sinks=sinks, sink_position=position)
                )
    assert llm.num_compilations == before


@pytest.mark.parametrize("name", ["sliding", "dilated", "StreamingLLM", "LM-Infinite", "global"])
@pytest.mark.parametrize("block_size", [8, 16])
def test_live_blocks_stay_bounded_however_long_the_text(engines, name, block_size):
    pattern = PATTERNS[name]
    llm = engines("GQA", 16, block_size)
    llm.set_pattern(pattern)
    llm.clear_records()
    text = np.arange(100) % 61
    llm.generate({"prompt_token_ids": text}, SamplingParams(temperature=0, max_tokens=20, detokenize=False))
    bound = math.ceil(pattern.num_sinks / block_size) + math.ceil(WINDOW / block_size) + 1
    if pattern.global_every:
        bound += sum(1 for b in range(0, 120, block_size) if any(t % 10 == 0 for t in range(b, b + block_size)))
    assert max(r.blocks_in_use for r in llm.records) <= bound
    assert llm.records[-1].blocks_in_use == 0


def test_a_pool_of_little_more_than_a_window_serves_a_long_text():
    config, params = make_model("GQA")
    pattern = PATTERNS["StreamingLLM"]
    small = math.ceil(3 / 8) + math.ceil(WINDOW / 8) + 1
    llm = LLM.from_params(
        config,
        params,
        block_size=8,
        num_blocks=small,
        max_num_seqs=2,
        max_num_batched_tokens=32,
        query_tile=8,
        max_model_len=250,
        pattern=pattern,
    )
    text = np.random.default_rng(1).integers(0, 61, 240)
    asked = SamplingParams(temperature=0, max_tokens=10, detokenize=False)
    [got] = llm.generate({"prompt_token_ids": text}, asked)
    whole = np.concatenate([text, got.outputs[0].token_ids])
    expected = reference_logprobs(params, config, whole, pattern)
    assert got.outputs[0].token_ids == expected[len(text) - 1 : -1].argmax(-1).tolist()
    assert max(r.peak_blocks for r in llm.records) <= small


def test_more_repositioned_sinks_than_the_engine_was_made_for_are_refused(engines):
    llm = engines("GQA", 16, 8)
    with pytest.raises(
        ValueError, match=r"17 sinks at 'cache' positions.*at most 16; give it max_repositioned_sinks=17"
    ):
        llm.set_pattern(AttentionPattern(window=WINDOW, num_sinks=17, sink_position="cache"))
