"""Traps of latent attention and of DeepSeek's routing: each changes what the golden files of transformers have."""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ksana_jax.core.config import ConfigError, ModelConfig
from ksana_jax.core.layer_spec import ExpertsSpec, LatentSpec
from ksana_jax.loading.load import abstract_params
from ksana_jax.methods.selection.lightning_indexer import index_scores
from ksana_jax.models.dense import dense_logits
from ksana_jax.models.experts import route
from ksana_jax.models.families import config_from_hf
from ksana_jax.models.flops import StepFlops
from ksana_jax.models.params import num_params
from tests.golden.cases import golden_case
from tests.models import test_golden

pytestmark = pytest.mark.usefixtures("quick_compiles")
V2, V3, V32, M4, CPM = (
    "deepseek_v2-latent-rope-yarn-experts",
    "deepseek_v3-latent-rope-yarn-experts",
    "deepseek_v32-latent-indexer-rope-yarn-experts",
    "mistral4-latent-rope-yarn-experts-new",
    "minicpm3-latent-rope-long-tied",
)


def model_of(name: str) -> Any:
    return test_golden.model_of(name)


def moved(name: str, **changes) -> float:
    """How far log-probabilities are from those of transformers with another config, as a part of their spread."""
    case, (config, params) = golden_case(name), model_of(name)
    scores = dense_logits(
        params, jnp.asarray(case.prompts[2]), config=dataclasses.replace(config, **changes), max_len=1
    )
    return float(np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() / np.ptp(case.logprobs[2]))


def latent_of(name: str, **changes) -> LatentSpec:
    return dataclasses.replace(model_of(name)[0].latent, **changes)


def test_golden_logits_agree_within_a_hundred_thousandth_of_their_spread():
    for name in (V2, V3, V32, M4, "youtu-latent-tied", "glm4_moe_lite-latent-experts", CPM):
        assert moved(name) < 1e-5


@pytest.mark.parametrize("name", [V2, V3, CPM])
def test_norms_of_latents_have_an_epsilon_of_their_own(name):
    assert model_of(name)[0].norm_eps == 1e-2
    assert moved(name, latent=latent_of(name, eps=1e-2)) > 1e-3


@pytest.mark.parametrize("name", [V2, V3])
def test_scores_have_the_square_of_yarns_factor(name):
    scale = 20**-0.5
    assert model_of(name)[0].attention_scale == pytest.approx(scale * (0.1 * np.log(4) + 1) ** 2)
    assert moved(name, attention_scale=scale) > 1e-3
    assert moved(name, attention_scale=scale * (0.1 * np.log(4) + 1)) > 1e-3


@pytest.mark.parametrize("name", [V2, V3, M4, CPM])
def test_rotations_pair_neighbours_or_halves(name):
    assert model_of(name)[0].latent.interleaved == (name != CPM)
    assert moved(name, latent=latent_of(name, interleaved=name == CPM)) > 1e-3


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (V2, {"groups_by": 2}),
        (V2, {"num_groups": 1, "groups_chosen": 1}),
        (V2, {"factor": 1.0}),
        (V2, {"normalised": True}),
        (V3, {"groups_by": 1}),
        (V3, {"scoring": "softmax"}),
        (V3, {"normalised": False}),
        (V3, {"factor": 1.0}),
        (M4, {"groups_by": 1}),
        (M4, {"scoring": "sigmoid"}),
        (M4, {"normalised": False}),
    ],
)
def test_golden_files_notice_each_part_of_the_routing(name, changes):
    assert moved(name, experts=dataclasses.replace(model_of(name)[0].experts, **changes)) > 1e-3


def test_golden_files_notice_a_choice_without_its_bias():
    config, params = model_of(V3)
    assert moved(V3, experts=dataclasses.replace(config.experts, choice_bias=True)) < 1e-5
    layers = tuple(p if p.choice_bias is None else p.replace(choice_bias=0 * p.choice_bias) for p in params.layers)
    case = golden_case(V3)
    scores = dense_logits(params.replace(layers=layers), jnp.asarray(case.prompts[2]), config=config, max_len=1)
    assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 0.05


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_come_from_the_best_groups_and_their_weights_lack_the_bias(scoring):
    spec = ExpertsSpec(
        **{"num_experts": 12, "num_chosen": 3, "normalised": scoring == "sigmoid", "scoring": scoring, "factor": 2.5},
        **{"num_groups": 4, "groups_chosen": 2, "groups_by": 2, "choice_bias": True},
    )
    rng = np.random.default_rng(4)
    scores, bias = rng.standard_normal((50, 12)).astype(np.float32), rng.standard_normal(12).astype(np.float32)
    chosen, weights = route(jnp.asarray(scores), spec, jnp.asarray(bias))
    for row, of_row, found in zip(scores.astype(np.float64), np.asarray(chosen), np.asarray(weights), strict=True):
        powers = np.exp(row)
        given = powers / powers.sum() if scoring == "softmax" else 1 / (1 + 1 / powers)
        choice = given + bias
        groups = sorted(range(4), key=lambda g: -np.sort(choice[3 * g : 3 * g + 3])[1:].sum())[:2]
        of_groups = [e for e in range(12) if e // 3 in groups]
        expected = sorted(of_groups, key=lambda e: -choice[e])[:3]
        assert of_row.tolist() == expected
        total = given[expected].sum() if scoring == "sigmoid" else 1
        np.testing.assert_allclose(found, 2.5 * given[expected] / total, rtol=1e-5)


def test_queries_of_mistral_4_grow_from_the_length_before_yarn_on():
    case, (config, params) = golden_case(M4), model_of(M4)
    assert config.query_growth == (0.4, 24)
    assert moved(M4, query_growth=(0.1, 24)) > 1e-3 and moved(M4, query_growth=(0.4, 25)) > 1e-3
    plain = dataclasses.replace(config, query_growth=None)
    scores = jax.nn.log_softmax(dense_logits(params, jnp.asarray(case.prompts[2]), config=plain, max_len=1))
    apart = np.abs(scores - case.logprobs[2]).max(axis=1)
    assert apart[:24].max() < 1e-4 and apart[24:].max() > 0.05


INDEXER_TRAPS = {
    "one token fewer": lambda p, spec: (p, {"top_k": spec.top_k - 1}),
    "all tokens": lambda p, spec: (p, {"top_k": 70}),
    "another epsilon": lambda p, spec: (p, {"eps": 1.0}),
    "keys without the bias of their norm": lambda p, spec: (p.replace(index_k_norm=p.index_k_norm.at[1].set(0)), {}),
    "keys without the factors of their norm": lambda p, spec: (p.replace(index_k_norm=p.index_k_norm.at[0].set(1)), {}),
    "heads of equal weight": lambda p, spec: (p.replace(w_index_weights=jnp.ones_like(p.w_index_weights)), {}),
    "neighbours rotated": lambda p, spec: (p.replace(w_index_q=halves_apart(p.w_index_q)), {}),
}


def halves_apart(w: jax.Array) -> jax.Array:
    """Reorders an indexer's queries as if its checkpoint paired neighbours."""
    order = np.r_[0:8:2, 1:8:2, 8:12]
    return w.reshape(16, 12, -1)[:, order].reshape(w.shape)


@pytest.mark.parametrize("trap", INDEXER_TRAPS)
def test_golden_files_notice_each_part_of_the_indexer(trap):
    case, (config, params) = golden_case(V32), model_of(V32)
    layers, changes = zip(*(INDEXER_TRAPS[trap](p, config.latent.indexer) for p in params.layers), strict=True)
    indexer = dataclasses.replace(config.latent.indexer, **changes[0])
    other = dataclasses.replace(config, latent=latent_of(V32, indexer=indexer))
    scores = dense_logits(params.replace(layers=layers), jnp.asarray(case.prompts[2]), config=other, max_len=1)
    assert np.abs(jax.nn.log_softmax(scores) - case.logprobs[2]).max() > 0.05


def test_scores_of_an_indexer_are_those_of_its_definition_and_hadamard_matrices_change_none():
    rng = np.random.default_rng(8)
    q, weights, keys = rng.standard_normal((5, 3, 8)), rng.standard_normal((5, 3)), rng.standard_normal((7, 8))
    expected = np.zeros((5, 7))
    for t, head, c in np.ndindex(5, 3, 7):
        expected[t, c] += weights[t, head] * max(q[t, head] @ keys[c], 0)
    np.testing.assert_allclose(index_scores(*map(jnp.asarray, (q, weights, keys)), jnp), expected, atol=1e-5)
    hadamard = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 3) * 8**-0.5
    np.testing.assert_allclose(index_scores(q @ hadamard, weights, keys @ hadamard, np), expected, atol=1e-5)


def test_the_bias_of_a_choice_keeps_its_bits_in_any_dtype():
    config, _ = model_of(V3)
    layers: Any = abstract_params(config, "bf16").layers
    assert layers[0].choice_bias is None and layers[1].choice_bias.dtype == jnp.float32
    assert layers[1].w_router.dtype == jnp.bfloat16


# Sizes of DeepSeek's own configs, with their number of weights.
REAL = {
    "DeepSeek-V2-Lite": (
        {
            **{"model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944},
            **{"num_hidden_layers": 27, "num_attention_heads": 16, "q_lora_rank": None, "first_k_dense_replace": 1},
            **{"moe_intermediate_size": 1408, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
            "max_position_embeddings": 163_840,
        },
        15_706_484_224,
    ),
    "DeepSeek-V3": (
        {
            **{"model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61},
            **{"num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 163_840},
        },
        671_026_419_200,
    ),
    "DeepSeek-V3.2-Exp": (
        {
            **{"model_type": "deepseek_v32", "vocab_size": 129_280, "hidden_size": 7168, "num_hidden_layers": 61},
            **{"num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 163_840},
        },
        671_026_419_200 + 61 * (64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168),
    ),
    "Mistral-Small-4-119B": (
        {"model_type": "mistral4", "vocab_size": 131_072, "hidden_size": 4096, "num_hidden_layers": 36}
        | {"num_attention_heads": 32, "max_position_embeddings": 1_048_576},
        118_972_826_624,
    ),
    "Kimi-K2-Instruct": (
        {
            **{"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163_840},
            **{"hidden_size": 7168, "intermediate_size": 18_432, "moe_intermediate_size": 2048, "moe_layer_freq": 1},
            **{"num_hidden_layers": 61, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
            **{"num_attention_heads": 64, "num_key_value_heads": 64, "attention_bias": False, "q_lora_rank": 1536},
            **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
            **{"n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "scoring_func": "sigmoid"},
            **{"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
            **{"routed_scaling_factor": 2.827, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 50_000.0},
            **{"max_position_embeddings": 131_072, "tie_word_embeddings": False, "torch_dtype": "bfloat16"},
            **{"bos_token_id": 163_584, "eos_token_id": 163_585},
            "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
            | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        1_026_408_232_448,
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_weights_of_published_models_are_counted(name):
    values, expected = REAL[name]
    config = config_from_hf(values)
    assert num_params(config) == expected
    head_dim = 320 if "Mistral" in name else 576
    assert StepFlops.of(config).pair == 4 * config.num_layers * config.num_heads * head_dim


def test_kimi_k2_is_deepseek_v3_by_another_name():
    values = REAL["Kimi-K2-Instruct"][0]
    config = config_from_hf(values)
    assert config == config_from_hf(values | {"model_type": "deepseek_v3"}) and config.family == "deepseek_v3"
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * np.log(32) + 1) ** 2)
    assert config.experts and config.experts.factor == 2.827 and config.experts.num_groups == 1


REFUSED = {
    "attention_bias is True; supported: false": {"attention_bias": True},
    "rope_interleave is False; supported: true": {"rope_interleave": False},
    "num_key_value_heads is 2; supported: num_attention_heads 4": {"num_key_value_heads": 2},
    "kv_lora_rank is 25; must be even": {"kv_lora_rank": 25},
    "scoring_func is 'softmax'; supported: sigmoid": {"scoring_func": "softmax"},
    "topk_method is 'greedy'; supported: noaux_tc": {"topk_method": "greedy"},
    "moe_layer_freq is 2; supported: 1": {"moe_layer_freq": 2},
    "mscale_all_dim is 1.0; supported: with yarn, the rope is linear": {
        "rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}
    },
    "groups_chosen 3 is above num_groups 2": {"n_group": 2, "topk_group": 3},
    "num_experts_per_tok is 5; must be at most 4": {"num_experts_per_tok": 5},
    "first_k_dense_replace is -1": {"first_k_dense_replace": -1},
    "sliding_window is 12; supported by": {"sliding_window": 12},
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_field_that_would_change_logits_is_refused(said):
    values = json.loads((golden_case(V3).model_dir / "config.json").read_text())
    with pytest.raises(ConfigError) as refusal:
        config_from_hf(values | REFUSED[said])
    assert said in str(refusal.value)


def test_a_config_whose_sizes_do_not_fit_its_latents_is_refused():
    config = ModelConfig(num_kv_heads=1, head_dim=32, latent=LatentSpec(24, 8, 8, 10)).validate()
    with pytest.raises(ConfigError, match="num_kv_heads 2 and head_dim 30 must be 1 and 32 with latents"):
        dataclasses.replace(config, num_kv_heads=2, head_dim=30).validate()
    with pytest.raises(ConfigError, match="latent rank is 23, must be even"):
        dataclasses.replace(config, latent=LatentSpec(23, 8, 8, 10)).validate()
