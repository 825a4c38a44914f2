"""Each pair of settings in the list is refused, by a door that users have, with the reason in one line."""

import dataclasses
import re
from pathlib import Path

import pytest

from ksana_jax import LLM, SamplingParams
from ksana_jax.core import refusals
from ksana_jax.core.config import ConfigError, EngineConfig
from ksana_jax.core.layer_spec import LatentSpec
from ksana_jax.core.patterns import FULL
from ksana_jax.core.recurrent import ShortConvSpec
from ksana_jax.core.refusals import REFUSALS
from ksana_jax.engine.settings import check_policies
from ksana_jax.loading.export import export_hf
from ksana_jax.models.params import init_params
from tests.engine.drafters import draft_model
from tests.engine.small import SMALL, make_llm, model

SOME = {
    "kv_eviction": {"kv_eviction": {"method": "knorm", "budget": 20}},
    "kv_selection": {"kv_selection": {"method": "quest", "budget": 32, "full_layers": 0}},
    refusals.ADDS_UP_ATTENTION: {"kv_eviction": {"method": "h2o", "budget": 20}},
    "enable_prefix_caching": {"enable_prefix_caching": True},
    "shared_prefix_attention": {"shared_prefix_attention": True},
    refusals.FEWER_BITS: {"kv_eviction": {"method": "mikv", "of": {"method": "knorm"}}, "kv_cache_dtype": "f32"},
    refusals.WHOLE_BLOCKS: {"kv_cache_dtype": "kivi4"},
    refusals.CACHES_EVICTED: {"kv_eviction": {"method": "knorm", "budget": 20}, "enable_prefix_caching": True},
    refusals.REWRITES: {"kv_eviction": {"method": "d2o", "budget": 20}},
    refusals.ROTATES_READ: {"kv_cache_dtype": "kvquant4"},
    "kv_full_precision_layers": {"kv_full_precision_layers": [0]},
    refusals.ABSOLUTE: {"kv_eviction": {"method": "knorm", "budget": 20}},
    refusals.LATENTS: {"latent": LatentSpec(8, 4, 4, 4), "num_kv_heads": 1, "head_dim": 12},
    "kv_cache_dtype latent8": {"kv_cache_dtype": "latent8"},
    refusals.NO_LATENTS: {},
    refusals.INDEXER: {"kv_selection": {"method": "lightning_indexer"}},
    refusals.NO_INDEXER: {},
    refusals.READS_OUTPUTS: {"kv_eviction": {"method": "criticalkv", "budget": 20}},
    refusals.HEADS_APART: {"kv_eviction": {"method": "adakv", "memory": "freed", "budget": 20}},
    refusals.ALIBI: {"alibi": (0.5, 0.25, 0.125, 0.0625)},
    refusals.SHARED_KV: {"kv_layers": (0, 0)},
    refusals.OTHER_PATTERN: {"pattern": [{"window": 8}, "full"]},
    refusals.UNEVEN: {"kv_cache_dtype": "int8", "pattern": [{"window": 8}, "full"]},
    refusals.NOT_NATIVE: {"kv_cache_dtype": "int4"},
    refusals.NO_FULL_LAYER: {"pattern": "sliding_window"},
    refusals.BY_HEAD: {"pattern": {"window": 8, "full_heads": [[0], [1]]}},
    "speculative_config": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    refusals.BRANCHES: {"speculative_config": {"method": "trie", "num_speculative_tokens": 4, "decoding_mode": "hier"}},
    refusals.COMPARES: {"speculative_config": {"method": "trie", "num_speculative_tokens": 4, "acceptance": "block"}},
    refusals.DRAFT_MODEL: {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 4}},
    refusals.INVARIANT: {"numerics": "invariant"},
    refusals.HOST_EMBEDDING: {"embedding_device": "host"},
    refusals.PREFER: {"operators": {"prefer": "agreement"}},
    refusals.COMPARES_HEADS: {"kv_eviction": {"method": "tova"}},
    "tensor_parallel_size": {"tensor_parallel_size": 2},
    "data_parallel_size": {"data_parallel_size": 2},
    refusals.RECURRENT: {"recurrent": ShortConvSpec((0,))},
    "kept_tokens": {"kept_tokens": True},
    "enable_lora": {"enable_lora": True},
    "distributed": {"distributed": {"coordinator_address": "a:1", "num_processes": 2, "process_id": 0}},
    "disk_cache_dir": {"disk_cache_dir": "x", "enable_prefix_caching": True, "host_cache_bytes": 2**20},
    "beam_width": {"beam_width": 2},
    "stop": {"stop": "a"},
    "stop_token_ids": {"stop_token_ids": [3]},
    "forced_token_ids": {"forced_token_ids": [5]},
    "logprobs": {"logprobs": 1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "min_tokens": {"min_tokens": 1},
    refusals.BIASES: {"presence_penalty": 1.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.1},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "ignore_eos": {"ignore_eos": True},
    refusals.FORBIDS: {"bad_words": ["a"]},
}
OF_REQUESTS = {"beam_width", "stop", "logprobs", "prompt_logprobs", "min_tokens", refusals.BIASES}
OF_REQUESTS |= {"top_k", "top_p", "min_p", "stop_token_ids", "forced_token_ids"}
OF_REQUESTS |= {"structured_outputs", "ignore_eos", refusals.FORBIDS}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    export_hf(path := tmp_path_factory.mktemp("drafter"), *draft_model("first"))
    return str(path)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: f"{r.setting} and {r.other}")
def test_listed_settings_are_refused_together(refusal, drafter):
    names = {refusal.setting, refusal.other}
    given = SOME[refusal.setting] | SOME[refusal.other]
    if "kv_full_precision_layers" in names:
        given.setdefault("kv_cache_dtype", "int8")
    if names == {refusals.BRANCHES, refusals.COMPARES}:
        given["speculative_config"] = SOME[refusals.BRANCHES]["speculative_config"] | {"acceptance": "block"}
    if refusals.DRAFT_MODEL in names:
        given["speculative_config"] = given["speculative_config"] | {"model": drafter}
    with pytest.raises(ValueError, match=re.escape(refusal.reason)) as caught:
        if names <= OF_REQUESTS:
            SamplingParams(**given)
        elif of_model := given.keys() & {"alibi", "kv_layers", "recurrent", *SOME[refusals.LATENTS]}:
            config, params = model()
            config = dataclasses.replace(config, **{name: given.pop(name) for name in of_model})
            if "recurrent" in of_model:
                EngineConfig(**{n: x for n, x in given.items() if n != "pattern"}).for_model(config, (FULL,) * 2)
                params = init_params(config)
            llm = LLM.from_params(config, params, **SMALL, **given)
            llm.generate([[1, 2]], SamplingParams(max_tokens=1, detokenize=False))
        else:
            make_llm(**given)
    assert "\n" not in str(caught.value) and " does not go with " in str(caught.value)


def test_all_that_does_not_fit_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        EngineConfig(tensor_parallel_size=2, numerics="invariant", kv_eviction={"method": "tova"})
    said = str(caught.value)
    assert said.count(" does not go with ") == 2 and "tensor_parallel_size 2 does not go with numerics" in said


def test_settings_that_go_together_pass():
    check_policies(EngineConfig(kv_eviction={"method": "knorm"}, **SOME["speculative_config"]))
    assert refusals.check({"kv_eviction": True, "enable_prefix_caching": False}) is None


def test_the_page_on_status_prints_the_list():
    page = (Path(__file__).parents[1] / "docs/reference/status.md").read_text()
    assert refusals.table() in page, "python -m ksana_jax.core.refusals prints the table"
