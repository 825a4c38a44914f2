"""Long chunks of one row attend to keys and values expanded from latents, and compute what latents give."""

import dataclasses
import re
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams, Steering
from ksana_jax.core.config import EngineConfig
from ksana_jax.core.layer_spec import LatentSpec
from ksana_jax.models.dense import dense_logits
from ksana_jax.ops import expanded
from ksana_jax.runner import compiling
from ksana_jax.runner.planner.step_memory import step_bytes
from ksana_jax.scheduler.step import lone_chunks
from ksana_jax.scheduler.step.ladders import all_shapes, largest_shapes, make_buckets
from tests.engine.test_latents import CONFIG, H2O, TEXT, params, read_back

# A chunk of 27 tokens or more is expanded: 2 * 24 * (8 + 10) / (2 * (32 - 16)).
SETTINGS = {"block_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 32, "query_tile": 8, "max_model_len": 128}
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, prompt_logprobs=0)
PROMPT = TEXT[:90].tolist()


def make(**settings) -> tuple[LLM, list[Any]]:
    """An engine, and the shapes of its steps as they are built."""
    llm = LLM.from_params(CONFIG, params(), **SETTINGS | {"num_blocks": 80} | settings)
    shapes, build = [], llm.engine.builder.build

    def noted(*given):
        found = build(*given)
        shapes.append(found[0].shape)
        return found

    llm.engine.builder.build = noted  # pyright: ignore[reportAttributeAccessIssue]
    return llm, shapes


def scores(llm, **asked) -> np.ndarray:
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], dataclasses.replace(SCORED, **asked))
    return np.array([next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]])


def of_prompt(logprobs) -> np.ndarray:
    return np.asarray(logprobs)[np.arange(len(PROMPT) - 1), PROMPT[1:]]


@pytest.mark.parametrize("attention", ["auto", "xla"])
@pytest.mark.parametrize("pattern", [{}, {"window": 12, "num_sinks": 3, "sink_position": "absolute"}], ids=str)
def test_scores_are_those_of_the_model_without_a_cache(pattern, attention):
    llm, shapes = make(pattern=pattern, operators={"attention": attention})
    config = dataclasses.replace(CONFIG, pattern=AttentionPattern(**pattern))
    wanted = of_prompt(jax.nn.log_softmax(dense_logits(params(), np.array(PROMPT), config=config)))
    np.testing.assert_allclose(scores(llm), wanted, rtol=0, atol=1e-5 * wanted.std())
    # Chunks of 32, 32 and 26 tokens: the last is too short.
    assert [shape.alone for shape in shapes[:3]] == [True, True, False]


def test_pieces_of_bfloat16_are_written_without_a_copy_of_all_in_float32(monkeypatch):
    programs, seen = [], Mock(lowered=lambda lowered, _: programs.append(lowered.compile().as_text()))
    monkeypatch.setattr(compiling, "observers", [seen])
    monkeypatch.setattr(expanded, "PIECE_TOKENS", 16)
    llm = LLM.from_params(CONFIG, jax.tree.map(lambda w: w.astype("bfloat16"), params()), **SETTINGS, num_blocks=80)
    llm.generate([{"prompt_token_ids": PROMPT[:32]}], dataclasses.replace(SCORED, prompt_logprobs=None))
    assert set(re.findall(r"(\w+)\[\d+,1,2,\d+,4,\d+\]", " ".join(programs))) == {"u16", "bf16"}


@pytest.mark.parametrize("codec", ["int8", "fp8_e4m3", "int4", "hadamard4"])
def test_keys_and_values_are_expanded_from_decoded_latents(codec):
    llm, shapes = make(kv_cache_dtype=codec)
    exact, encoded = (of_prompt(read_back(np.array(PROMPT), name)[0]) for name in ("f32", codec))
    # Numbers that float32 rounds to the next code, a few in ten thousand, are what remains.
    assert np.abs(scores(llm) - encoded).mean() < 0.1 * np.abs(exact - encoded).mean()
    assert shapes[0].alone


def test_a_cached_prefix_is_expanded_too_and_heads_may_be_off():
    llm, shapes = make(enable_prefix_caching=True)
    [first] = llm.generate([{"prompt_token_ids": PROMPT[:40]}], dataclasses.replace(SCORED, prompt_logprobs=None))
    shapes.clear()
    off = Steering(heads_off={0: (1, 3)})
    for steering in (None, off):
        wanted = read_back(np.array(PROMPT), steering=steering)[0]
        asked = dataclasses.replace(SCORED, prompt_logprobs=None, logprobs=-1, steering=steering, max_tokens=1)
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], asked)
        np.testing.assert_allclose(output.outputs[0].distributions[0], wanted[-1], atol=2e-5)
    assert first.outputs and shapes[0].alone and shapes[0].num_tokens == 32


def test_chunks_next_to_others_attend_to_latents():
    llm, shapes = make()
    prompts = [{"prompt_token_ids": PROMPT[:n]} for n in (40, 16)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False))
    assert [shape.alone for shape in shapes[:2]] == [True, False]


@pytest.mark.parametrize(
    "settings",
    [
        {"numerics": "invariant", "block_size": 16},
        {"kv_eviction": H2O},
        {"kv_selection": {"method": "quest", "budget": 96, "full_layers": 0}},
        {"max_repositioned_sinks": 2},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_reads_latents_otherwise_keeps_them(settings):
    config = EngineConfig(**SETTINGS | settings, dtype="f32")
    assert lone_chunks.lone_chunks(CONFIG, EngineConfig(**SETTINGS, dtype="f32")) == (27, 2**29 // (2 * 4 * 16 * 4 * 4))
    assert lone_chunks.lone_chunks(CONFIG, config) is None
    assert lone_chunks.lone_chunks(dataclasses.replace(CONFIG, latent=None), EngineConfig(**SETTINGS)) is None


def test_the_least_chunk_follows_from_the_sizes():
    assert LatentSpec(512, 64, 128, 128).least_expanded == 342
    assert LatentSpec(24, 8, 28, 10).least_expanded is None  # keys as long as latents
    assert LatentSpec(24, 8, 8, 40).least_expanded is None  # longer values


def test_keys_and_values_that_take_too_much_memory_are_not_expanded(monkeypatch):
    config = EngineConfig(**SETTINGS, dtype="f32")
    bytes_of_block = 2 * 4 * 4 * 16 * 4  # keys and values of 4 tokens and 4 heads
    for most, width in ((32, 32), (31, 31)):
        monkeypatch.setattr(lone_chunks, "MOST_BYTES", most * bytes_of_block)
        buckets = make_buckets(config, "cpu", model=CONFIG)
        assert buckets.alone == (27, width)
        alone = [shape for shape in all_shapes(buckets) if shape.alone]
        assert {shape.table_width for shape in alone} == ({32} if most == 32 else set())
        assert buckets.shape(0, [32], 20).alone == (most == 32)
        assert not buckets.shape(0, [26], 20).alone and not buckets.shape(1, [32], 20).alone
        assert not buckets.shape(0, [28, 2], 20).alone


def test_a_plan_counts_the_bytes_of_expanded_keys_and_values():
    config = EngineConfig(**SETTINGS | {"max_model_len": 1024}, dtype="f32")
    model = dataclasses.replace(CONFIG, max_position=1024)
    [*others, alone] = largest_shapes(make_buckets(config, "cpu", model=model))
    assert alone.alone and not any(shape.alone for shape in others) and alone.table_width == 256
    absorbed, expanded = step_bytes(model, [others[0], alone], dtype="f32", block_size=4, max_model_len=1024)
    assert expanded.network > 256 * 4 * 2 * 4 * 16 * 4 > absorbed.network
