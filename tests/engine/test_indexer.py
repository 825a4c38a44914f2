"""Tokens that a lightning indexer chooses, under everything that moves, encodes and shares the pool. Expected are those
of the model without a cache, which `tests/models/test_golden.py` compares with transformers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax import LLM, Steering
from ksana_jax.core.config import ModelConfig
from ksana_jax.core.layer_spec import IndexerSpec, LatentSpec
from ksana_jax.engine.activations import activations
from ksana_jax.kv.reading import read_bytes
from ksana_jax.models.dense import attention_weights, dense_logits
from ksana_jax.models.params import init_params
from tests import machine
from tests.engine import test_latents
from tests.engine.small import tokens_of
from tests.engine.test_latents import GREEDY, PROMPTS, SETTINGS, dense_greedy

INDEXER = IndexerSpec(num_heads=16, head_dim=12, top_k=9)
CONFIG = dataclasses.replace(test_latents.CONFIG, latent=LatentSpec(24, 8, 8, 10, 12, indexer=INDEXER))
ALL = {"method": "lightning_indexer", "budget": 96}
pytestmark = pytest.mark.usefixtures("few_shapes")
_programs: dict = {}


@functools.cache
def params():
    return init_params(CONFIG, seed=3, std=0.5)


def make(**settings) -> LLM:
    llm = LLM.from_params(CONFIG, params(), **SETTINGS | {"num_blocks": 120} | settings)
    llm.runner._compiled = _programs.setdefault(repr(settings), llm.runner._compiled)
    return llm


def choosing(top_k: int) -> ModelConfig:
    indexer = dataclasses.replace(INDEXER, top_k=top_k)
    return dataclasses.replace(CONFIG, latent=LatentSpec(24, 8, 8, 10, 12, indexer=indexer))


@functools.cache
def greedy(top_k=INDEXER.top_k) -> list[list[int]]:
    return dense_greedy(choosing(top_k), params())


SAME = {
    "chunks and blocks": {},
    "other chunks": {"max_num_batched_tokens": 32, "query_tile": 4, "block_size": 16, "num_blocks": 40},
    "several steps in a call": {"num_scheduler_steps": 4},
    "a cached prefix": {"enable_prefix_caching": True},
    "swap": {"num_blocks": 24, "host_cache_bytes": 2**18, "preempt": "swap"},
    "recomputation": {"num_blocks": 24, "preempt": "recompute"},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "the XLA reference": {"operators": {"attention": "xla"}},
}


@pytest.mark.parametrize("name", SAME)
def test_tokens_are_those_of_the_model_without_a_cache(name):
    llm = make(**SAME[name])
    for _ in range(2 if "prefix" in name else 1):
        assert tokens_of(llm, PROMPTS, GREEDY) == greedy() != greedy(96)
    scheduler, counters = llm.engine.scheduler, llm.engine.memory.counters
    assert bool(scheduler.num_preemptions) == (name in ("swap", "recomputation"))
    assert bool(counters.hit_tokens) == ("prefix" in name)


@machine.compiled
def test_native_attention_reads_single_tokens():
    assert tokens_of(make(operators={"attention": "native"}), PROMPTS, GREEDY) == greedy()


@pytest.mark.parametrize("given", [ALL, {"method": "quest", "budget": 96, "full_layers": 0}], ids=lambda m: m["method"])
def test_a_named_method_takes_the_place_of_the_models_budget(given):
    llm = make(kv_selection=given)
    names = {leaf.name for leaf in llm.engine.scheduler.layout.leaves}
    assert names == {"kv", "summary" if given["method"] == "quest" else "index_key"}
    assert tokens_of(llm, PROMPTS, GREEDY) == greedy(96)


def test_whole_prompts_select_for_generated_tokens_only():
    forced = dataclasses.replace(GREEDY, max_tokens=None, forced_token_ids=greedy()[0], prompt_logprobs=0, logprobs=-1)
    found: dict[str, Any] = {}
    for prompts in ("whole", "streamed"):
        llm = make(kv_selection={"method": "lightning_indexer", "budget": INDEXER.top_k, "prompts": prompts})
        [found[prompts]] = llm.generate({"prompt_token_ids": PROMPTS[0]}, forced)
    scores = {k: dense(k, PROMPTS[0] + greedy()[0]) for k in (INDEXER.top_k, 96)}
    for prompts, k in (("whole", 96), ("streamed", INDEXER.top_k)):
        said = [entry[i].logprob for entry, i in zip(found[prompts].prompt_logprobs[1:], PROMPTS[0][1:], strict=True)]
        expected = scores[k][np.arange(len(said)), PROMPTS[0][1:]]
        np.testing.assert_allclose(said, expected, atol=1e-4)
    outputs = [found[prompts].outputs[0].distributions for prompts in ("streamed", "whole")]
    np.testing.assert_allclose(outputs[0], scores[INDEXER.top_k][len(PROMPTS[0]) - 1 : -1], atol=1e-4)
    # A token's latents follow from what the tokens before it attended to.
    assert np.abs(outputs[1] - outputs[0]).max() > 0.1


def dense(top_k: int, text: list[int]) -> np.ndarray:
    scores = dense_logits(params(), jnp.array(text), config=choosing(top_k))
    return np.asarray(jax.nn.log_softmax(scores))


@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8"}], ids=str)
def test_another_engine_continues_a_saved_session(tmp_path, settings):
    first, other = (make(enable_prefix_caching=True, **settings) for _ in range(2))
    [output] = first.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY)
    count = first.save_session(output, tmp_path / "session")
    assert other.restore_session(tmp_path / "session") == count >= 72
    longer = [PROMPTS[0] + output.outputs[0].token_ids]
    assert tokens_of(other, longer, GREEDY) == tokens_of(first, longer, GREEDY)
    assert other.engine.memory.counters.hit_tokens == first.engine.memory.counters.hit_tokens == count


def test_activations_show_the_chosen_tokens():
    found = activations(make(), {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    weights: Any = attention_weights(params(), jnp.array((PROMPTS[0] + greedy()[0])[:-1]), config=CONFIG)
    np.testing.assert_allclose(found.attention, weights, atol=1e-4)
    assert (found.attention > 0).sum(axis=-1).max() == INDEXER.top_k


def test_heads_are_turned_off_where_tokens_are_chosen():
    steering = Steering(heads_off={0: [3, 1]})
    steered, plain = make().generate(
        [{"prompt_token_ids": ids} for ids in PROMPTS], [dataclasses.replace(GREEDY, steering=steering), GREEDY]
    )
    assert steered.outputs[0].token_ids != greedy()[0] and plain.outputs[0].token_ids == greedy()[1]


def test_a_token_has_a_small_key_next_to_its_latent_and_few_are_read():
    llm = make(dtype="bf16")
    assert len(tokens_of(llm, PROMPTS[:1], GREEDY)[0]) == 16
    layout = llm.engine.scheduler.layout
    assert llm.runner.cache.nbytes == 120 * 4 * 2 * (32 + 12) * 2 == 120 * layout.block_bytes
    # 9 latents and all keys, in 2 layers; a text of two blocks has no more latents than that, and no key is read.
    assert read_bytes(layout, 80, 20) == 2 * 2 * (9 * 32 + 80 * 12) and read_bytes(layout, 8, 2) == 2 * 2 * 8 * 32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_eviction": {"method": "h2o", "budget": 32}}, "kv_eviction: summaries would describe keys that have been"),
        ({"enable_prefix_caching": True, "shared_prefix_attention": True}, "shared_prefix_attention: each row selects"),
        ({"numerics": "invariant", "block_size": 16}, "XLA computes the scores"),
        ({"pattern": {"window": 12}}, "queries select in layers with full attention only"),
        (
            {"speculative_config": {"method": "trie", "decoding_mode": "hier", "num_speculative_tokens": 4}},
            "keys of all branches",
        ),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_the_models_own_selection_is_refused_with_what_selection_is_refused_with(settings, said):
    with pytest.raises(ValueError, match=said) as refusal:
        make(**settings)
    assert "kv_selection" in str(refusal.value)


def test_models_without_an_indexer_refuse_it():
    with pytest.raises(ValueError, match="kv_selection lightning_indexer does not go with a model without an indexer"):
        test_latents.make(kv_selection=ALL)
