"""kv heads of one layer with different patterns are in blocks of separate groups: retrieval heads keep a text,
streaming heads sinks and a window (DuoAttention). Tokens equal the dense float64 model's, whatever happened to the
blocks."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams
from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.patterns import FULL
from ksana_jax.models.params import init_params
from tests import machine
from tests.engine.small import VOCAB, expect_dense, model, tokens_of
from tests.engine.two_texts import BLOCK, GREEDY, LONGEST, PROMPTS, SETTINGS, TEXT, dense_greedy
from tests.reference import reference_logprobs

WINDOW, SINKS = 12, 3
NEAR = AttentionPattern(window=WINDOW, num_sinks=SINKS, sink_position="absolute")
# Of two layers with two kv heads each.
PATTERN = (NEAR, FULL, NEAR, NEAR)
FULL_HEADS = [[1], []]
DUO = {"window": WINDOW, "num_sinks": SINKS, "sink_position": "absolute", "full_heads": FULL_HEADS}
_programs: dict = {}
pytestmark = pytest.mark.usefixtures("few_shapes")


def make(pattern=DUO, **settings) -> LLM:
    config, params = model()
    config = dataclasses.replace(config, max_position=4096)
    llm = LLM.from_params(config, params, pattern=pattern, **SETTINGS | settings)
    llm.runner._compiled = _programs.setdefault(repr((pattern, settings)), llm.runner._compiled)
    return llm


@functools.cache
def expected() -> list[list[int]]:
    return dense_greedy(*model(), PATTERN)


@pytest.mark.parametrize(
    "attention", [pytest.param("xla", marks=pytest.mark.soak), pytest.param("native", marks=machine.native_products)]
)
def test_log_probabilities_are_those_of_the_dense_model_and_streaming_heads_return_blocks(attention):
    llm, held = make(num_blocks=120, operators={"attention": attention}), []
    llm.engine.observers.append(lambda engine: held.append(engine.records[-1].blocks_in_use))
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    text = TEXT[: LONGEST - 1]
    [output] = llm.generate({"prompt_token_ids": text}, asked)
    assert output.prompt_logprobs is not None
    got = [entry[int(token)].logprob for entry, token in zip(output.prompt_logprobs[1:], text[1:], strict=True)]
    config, params = model()
    reference = reference_logprobs(params, config, text, PATTERN)[np.arange(len(text) - 1), text[1:]]
    # float32 against float64 through two layers.
    np.testing.assert_allclose(got, reference, atol=1e-4)
    assert [group.layers for group in llm.runner.layout.groups] == [(0,), (2,), (3,), (1,)]
    # A group of streaming heads has blocks of sinks and of a window, which touches one more than it fills.
    assert max(held[-3:]) <= LONGEST // BLOCK + 3 * (1 + WINDOW // BLOCK + 1)
    assert tokens_of(llm, PROMPTS, GREEDY) == expected()


def test_bytes_held_at_2048_tokens_are_those_of_full_heads_and_of_windows():
    text, size, window = 2048, 16, 256
    heads = {"preset": "duo_attention", "window": window, "full_heads": {"share": 0.5, "seed": 1}}
    sizes = {"block_size": size, "max_model_len": text + 16, "max_num_batched_tokens": 256, "query_tile": 64}
    llm, held = make(heads, num_blocks=400, **sizes), []
    llm.engine.observers.append(lambda engine: held.append(engine.records[-1].blocks_in_use))
    asked = dataclasses.replace(GREEDY, max_tokens=4)
    llm.generate({"prompt_token_ids": np.random.default_rng(3).integers(2, VOCAB, text)}, asked)
    layout = llm.runner.layout
    assert [len(group.layers) for group in layout.groups] == [2, 2]
    assert layout.block_bytes == 2 * 2 * size * model()[0].head_dim * 4, "keys and values of two heads"
    # The last token is never computed. The window of the next query begins within a block.
    full, near = -(-(text + 3) // size), 64 // size + window // size + 1
    assert held[-2] == full + near < 0.6 * 2 * full


def test_prefixes_are_found_where_every_head_has_what_later_queries_see():
    llm = make(num_blocks=120, enable_prefix_caching=True, shared_prefix_attention=True)
    assert [tokens_of(llm, [p], GREEDY)[0] for p in PROMPTS] == expected()
    assert llm.engine.memory.counters.hit_tokens == 40
    assert tokens_of(llm, PROMPTS, GREEDY) == expected()


def test_preempted_rows_are_swapped_and_come_back():
    llm = make(num_blocks=48, host_cache_bytes=2**18, preempt="swap")
    assert tokens_of(llm, PROMPTS, GREEDY) == expected()
    counters = llm.engine.memory.counters
    assert counters.swapped_out == counters.swapped_in > 0


@pytest.mark.parametrize("codec", ["int8", *(pytest.param(name, marks=pytest.mark.soak) for name in ("int4", "kivi4"))])
def test_codecs_store_each_head_as_in_blocks_of_whole_layers(codec):
    """Of an engine whose heads all see the text, half of them through a window longer than it."""
    prompts = [p[:30] for p in PROMPTS]
    far = {"window": LONGEST, "full_heads": FULL_HEADS}
    found = [tokens_of(make(p, num_blocks=300, kv_cache_dtype=codec), prompts, GREEDY) for p in ("full", far)]
    assert found[0] == found[1]


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("position", ["cache", "ceiling", "absolute"])
def test_heads_keep_their_own_sink_logits_biases_and_positions_of_sinks(position):
    config = ModelConfig(
        vocab_size=61,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=48,
        max_position=256,
        soft_cap=1.5,
        sinks="learned",
        alibi=(0.5, 0.25, 0.125, 0.0625) if position == "absolute" else None,
    )
    params = init_params(config, seed=3, std=0.4)
    sinks = np.random.default_rng(1).normal(1.0, 1.0, (2, 4)).astype(np.float32)
    layers = [dataclasses.replace(p, sink_logits=jnp.asarray(s)) for p, s in zip(params.layers, sinks, strict=True)]
    params = dataclasses.replace(params, layers=tuple(layers))
    near = AttentionPattern(window=6, num_sinks=3, sink_position=position)
    pattern = [near, FULL, FULL, near]
    sizes = {"block_size": 8, "max_num_seqs": 8, "query_tile": 8, "max_model_len": 64, "max_num_batched_tokens": 24}
    llm = LLM.from_params(config, params, pattern=pattern, **sizes)
    expect_dense(llm, config, params, [np.random.default_rng(7).integers(0, 61, n) for n in (17, 40)], pattern)


def test_the_pattern_of_heads_changes_within_their_groups_and_not_to_one_of_whole_layers():
    llm, (config, params) = make(num_blocks=120), model()
    llm.set_pattern(DUO | {"window": 8})
    [tokens] = tokens_of(llm, PROMPTS[:1], GREEDY)
    pattern = [p if p == FULL else dataclasses.replace(NEAR, window=8) for p in PATTERN]
    dense = reference_logprobs(params, config, np.array(PROMPTS[0] + tokens), pattern)
    assert tokens == dense[59:-1].argmax(-1).tolist()
    with pytest.raises(ConfigError, match="differ between the kv heads of a layer need an engine that was made for"):
        llm.set_pattern("full")
    assert llm.patterns == tuple(pattern)
