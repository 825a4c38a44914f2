"""Hugging Face configs as ModelConfig: fields read and defaults assumed."""

import dataclasses

import pytest

from ksana_jax.core.layer_spec import ExpertsSpec, RopeConfig
from ksana_jax.core.patterns import FULL, AttentionPattern
from ksana_jax.models.families import config_from_hf
from tests.models.hf_configs import (
    COHERE,
    COHERE2,
    FALCON,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GLM4,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    MPT,
    OLMO3,
    OLMOE,
    OPT,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    ROPES,
    SMOLLM3,
    STABLELM,
    without,
)

NOPE = RopeConfig("none")


def rope_of(values):
    return config_from_hf(values).layers[0].attention.rope


def test_llama_1_config_without_kv_heads_head_dim_or_rope_theta():
    config = config_from_hf(
        without(LLAMA, "num_key_value_heads", "model_type") | {"architectures": ["LLaMAForCausalLM"]}
    )
    assert (config.family, config.num_kv_heads, config.head_dim) == ("llama", 8, 8)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert (config.norm_eps, config.bos_id, config.eos_ids) == (1e-6, 1, (2,))
    assert not config.tie_embeddings and config.pattern == FULL


def test_head_dim_is_taken_from_the_config_where_given_even_if_width_is_no_multiple_of_heads():
    assert config_from_hf(LLAMA | {"head_dim": 32}).head_dim == 32
    assert config_from_hf(LLAMA | {"head_dim": 32, "hidden_size": 60}).d_model == 60
    assert config_from_hf(LLAMA | {"head_dim": None}).head_dim == 8
    assert config_from_hf(QWEN3).head_dim == 128  # what transformers assumes for this family alone


def test_biases_follow_the_family():
    def biases(values):
        config = config_from_hf(values)
        return config.qkv_bias, config.out_bias, config.mlp_bias

    assert biases(LLAMA) == (False, False, False)
    assert biases(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True)
    assert biases(QWEN2) == (True, False, False)
    assert biases(QWEN3 | {"attention_bias": True}) == (True, True, False)
    assert (config_from_hf(QWEN3).qk_norm, config_from_hf(QWEN2).qk_norm) == ("head", None)


def test_mistral_window_slides_in_all_layers():
    assert config_from_hf(MISTRAL | {"sliding_window": 128}).pattern == AttentionPattern(window=128)
    assert config_from_hf(MISTRAL | {"sliding_window": None}).pattern == FULL
    assert config_from_hf(MISTRAL).pattern == AttentionPattern(window=4096)


@pytest.mark.parametrize("values", [QWEN2, QWEN3])
def test_qwen_windows_follow_max_window_layers_or_layer_types(values):
    slide = AttentionPattern(window=16)
    on = values | {"use_sliding_window": True, "sliding_window": 16}
    assert config_from_hf(values | {"sliding_window": 16, "max_window_layers": 0}).pattern == FULL
    assert config_from_hf(on | {"max_window_layers": 3}).pattern == (FULL, FULL, FULL, slide)
    assert config_from_hf(on | {"max_window_layers": 0}).pattern == slide
    assert config_from_hf(on | {"max_window_layers": 9}).pattern == FULL
    assert config_from_hf(on | {"sliding_window": None, "max_window_layers": 0}).pattern == FULL
    kinds = ["sliding_attention", "full_attention"] * 2
    assert config_from_hf(on | {"layer_types": kinds}).pattern == (slide, FULL, slide, FULL)


def test_gemma_2_layers_slide_in_turn_and_its_scores_are_capped():
    config = config_from_hf(GEMMA2)
    slide = AttentionPattern(window=4096)
    assert config.pattern == (slide, FULL, slide, FULL)
    assert (config.soft_cap, config.logit_soft_cap, config.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (config.mlp, config.norm, config.norm_placement, config.embed_scale) == (
        "geglu",
        "rms_plus_one",
        "both",
        8.0,
    )
    assert config.tie_embeddings and config.head_dim == 256 and not config.qk_norm
    assert config_from_hf(GEMMA2 | {"attn_logit_softcapping": None}).soft_cap is None


def test_gemma_3_has_a_rope_for_sliding_and_one_for_full_layers_in_the_older_and_the_newer_form():
    config = config_from_hf(GEMMA3 | {"num_hidden_layers": 7})
    assert [layer.attention.pattern.window for layer in config.layers] == [4096] * 5 + [None, 4096]
    assert [layer.attention.rope.theta for layer in config.layers] == [1e4] * 5 + [1e6, 1e4]
    assert config.qk_norm == "head" and (config.soft_cap, config.logit_soft_cap) == (None, None)
    older = {"rope_theta": 5e5, "rope_local_base_freq": 100.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    newer = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }
    }
    every = {"sliding_window_pattern": 2}
    assert config_from_hf(GEMMA3 | older | every) == config_from_hf(GEMMA3 | newer | every)
    assert config_from_hf(GEMMA3 | older | every).rope == (RopeConfig(theta=100.0), RopeConfig("linear", 5e5, 8.0)) * 2
    assert (
        config_from_hf(GEMMA3 | {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}} | every).rope
        == (RopeConfig(theta=1e4), RopeConfig(theta=7.0)) * 2
    )


def test_layers_of_smollm3_lack_a_rope_in_turn_or_where_the_config_says():
    rope = RopeConfig(theta=2e6)
    assert config_from_hf(SMOLLM3).rope == (rope, rope, rope, NOPE)
    assert config_from_hf(SMOLLM3 | {"no_rope_layer_interval": 2}).rope == (rope, NOPE, rope, NOPE)
    assert config_from_hf(SMOLLM3 | {"no_rope_layers": [0, 1, 1, 0]}).rope == (NOPE, rope, rope, NOPE)
    assert config_from_hf(SMOLLM3 | {"no_rope_layers": [1] * 4}).rope == rope
    assert config_from_hf(SMOLLM3).tie_embeddings


def test_gemma_scales_its_embedding_and_adds_1_to_its_norms():
    config = config_from_hf(GEMMA)
    assert (config.embed_scale, config.norm, config.norm_placement) == (8.0, "rms_plus_one", "before")
    assert (config.mlp, config.head_dim, config.attention_scale, config.tie_embeddings) == ("geglu", 256, None, True)
    assert config_from_hf(GEMMA | {"hidden_activation": "gelu_pytorch_tanh"}) == config


def test_stablelm_rotates_a_quarter_of_each_head_and_may_normalise_once_for_both_parts():
    config = config_from_hf(STABLELM)
    assert (config.norm, config.norm_placement, config.qkv_bias, config.out_bias) == ("layer", "before", False, False)
    assert (config.rope, config.norm_eps) == (RopeConfig(partial_rotary_factor=0.25), 1e-5)
    other = config_from_hf(STABLELM | {"use_parallel_residual": True, "use_qkv_bias": True, "layer_norm_eps": 1e-3})
    assert (other.norm_placement, other.qkv_bias, other.norm_eps) == ("parallel_shared", True, 1e-3)


def test_layers_of_cohere_2_with_a_rope_have_a_window_and_the_others_neither():
    config, slide, rope = config_from_hf(COHERE2), AttentionPattern(window=4096), RopeConfig()
    assert config.pattern == (slide, slide, slide, FULL) and config.rope == (rope, rope, rope, NOPE)
    assert (config.norm, config.norm_placement, config.logit_scale) == ("layer_no_bias", "parallel_shared", 0.0625)
    listed = config_from_hf(COHERE2 | {"layer_types": ["full_attention", "sliding_attention"] * 2, "rope_theta": 5e4})
    assert listed.rope == (NOPE, RopeConfig(theta=5e4)) * 2 and listed.pattern == (FULL, slide) * 2
    older = config_from_hf(COHERE | {"attention_bias": True, "logit_scale": 0.5})
    assert (older.rope, older.pattern, older.logit_scale) == (RopeConfig(theta=5e5), FULL, 0.5)
    assert older.qkv_bias and older.out_bias and older.tie_embeddings


def test_multipliers_of_granite_scale_embedding_scores_residuals_and_logits():
    given = {"embedding_multiplier": 12, "attention_multiplier": 0.0156, "residual_multiplier": 0.22}
    config = config_from_hf(GRANITE | given | {"logits_scaling": 8.0})
    assert (config.embed_scale, config.residual_scale, config.logit_scale) == (12.0, 0.22, 0.125)
    assert config.layers[0].attention.scale == 0.0156 and config.layers[0].residual_scale == 0.22
    plain = config_from_hf(GRANITE)  # the default is 1, not 1 / sqrt(head_dim)
    assert (plain.attention_scale, plain.embed_scale, plain.residual_scale, plain.logit_scale) == (1, 1, 1, 1)


def test_experts_follow_the_family():
    assert config_from_hf(MIXTRAL).experts == ExpertsSpec(8, 2)
    assert config_from_hf(MIXTRAL).rope == RopeConfig(theta=1e6) and config_from_hf(MIXTRAL).pattern == FULL
    assert config_from_hf(OLMOE).experts == ExpertsSpec(64, 8, normalised=False)
    wide = config_from_hf(QWEN2_MOE | {"norm_topk_prob": True, "shared_expert_intermediate_size": 7})
    assert (wide.d_ff, wide.experts, wide.qkv_bias) == (1408, ExpertsSpec(60, 4, shared_d_ff=7), True)
    assert config_from_hf(QWEN3_MOE | {"mlp_only_layers": None}).experts == ExpertsSpec(128, 8, normalised=False)
    # transformers writes the number of experts under another name than Qwen's authors.
    assert config_from_hf(QWEN3_MOE | {"num_local_experts": 16}).experts == ExpertsSpec(16, 8, normalised=False)


def test_layers_of_qwen_without_experts_are_listed_or_all_but_every_nth():
    def plain(**fields):
        experts = config_from_hf(QWEN3_MOE | fields).experts
        return experts.plain_layers, experts.plain_d_ff

    assert plain() == plain(mlp_only_layers=[]) == ((), 0)
    assert plain(mlp_only_layers=[2, 0, 9]) == ((0, 2), 96)
    assert plain(decoder_sparse_step=2) == ((0, 2), 96)
    assert plain(decoder_sparse_step=3, mlp_only_layers=[2]) == ((0, 1, 2, 3), 96)
    config = config_from_hf(QWEN3_MOE | {"mlp_only_layers": [1]})
    assert [(spec.mlp.kind, spec.mlp.d_ff) for spec in config.first_layers(2).layers] == [
        ("swiglu_experts", 768),
        ("swiglu", 96),
    ]


def test_gpt_oss_has_windows_in_every_other_layer_and_a_stretched_rope_unless_the_config_says_otherwise():
    config, slide = config_from_hf(GPT_OSS), AttentionPattern(window=128)
    assert config.pattern == (slide, FULL, slide, FULL) and (config.sinks, config.head_dim) == ("learned", 64)
    assert config.experts == ExpertsSpec(8, 4, sigmoid_factor=1.702, limit=7.0)
    assert config.qkv_bias and config.out_bias and config.mlp_bias and config.norm_eps == 1e-5
    assert config.rope == RopeConfig("yarn", 150_000.0, 32.0, 4096, truncate=False)
    older = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1e4, "initial_context_length": 4096}
    assert config_from_hf(GPT_OSS | older).rope == RopeConfig("yarn", 1e4, 2.0, 4096)
    newer = {"rope_parameters": {"rope_type": "default"}, "layer_types": ["full_attention"] * 4}
    assert config_from_hf(GPT_OSS | newer | {"attention_bias": False}).rope == RopeConfig(theta=150_000.0)
    assert config_from_hf(without(GPT_OSS, "num_local_experts") | {"num_experts": 4}).experts.num_experts == 4


def test_glm4_rotates_half_of_each_head_unless_the_config_says_otherwise():
    config = config_from_hf(GLM4)
    assert (config.norm_placement, config.qkv_bias, config.out_bias) == ("both", True, False)
    assert config.rope == RopeConfig(partial_rotary_factor=0.5)
    newer = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.25}}
    assert config_from_hf(GLM4 | newer).rope == RopeConfig("linear", factor=4.0, partial_rotary_factor=0.25)
    assert config_from_hf(GLM4 | {"partial_rotary_factor": 1.0}).rope == RopeConfig()


def test_gpt_neox_rotates_a_quarter_of_each_head_and_may_have_its_parts_one_after_the_other():
    config = config_from_hf(GPT_NEOX)
    assert (config.norm, config.norm_placement, config.mlp, config.norm_eps) == ("layer", "parallel", "gelu", 1e-5)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.num_kv_heads) == (True, True, True, 8)
    assert config.rope == RopeConfig(partial_rotary_factor=0.25)
    older = {"rotary_pct": 0.5, "rotary_emb_base": 1000, "rope_scaling": {"type": "linear", "factor": 4.0}}
    newer = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000, "partial_rotary_factor": 0.5}
    expected = RopeConfig("linear", 1e3, 4.0, partial_rotary_factor=0.5)
    assert rope_of(GPT_NEOX | older) == rope_of(GPT_NEOX | {"rope_parameters": newer}) == expected
    both = older | {"partial_rotary_factor": 0.5, "rope_theta": 1000}  # as transformers 4.45 to 4.57 write them
    assert rope_of(GPT_NEOX | both) == expected
    config = config_from_hf(GPT_NEOX | {"use_parallel_residual": False, "attention_bias": False})
    assert (config.norm_placement, config.qkv_bias, config.mlp_bias) == ("before", False, True)


@pytest.mark.parametrize(("values", "offset", "mlp", "d_ff"), [(OPT, 2, "relu", 96), (GPT2, 0, "gelu_tanh", 256)])
def test_models_with_a_table_of_positions_have_no_rope(values, offset, mlp, d_ff):
    config = config_from_hf(values)
    assert (config.position_offset, config.rope, config.mlp, config.d_ff) == (offset, NOPE, mlp, d_ff)
    assert (config.norm, config.norm_placement, config.norm_eps) == ("layer", "before", 1e-5)
    assert config.qkv_bias and config.out_bias and config.mlp_bias and config.tie_embeddings


def test_gpt2_may_give_the_width_of_its_mlps_and_leave_scores_unscaled():
    assert config_from_hf(GPT2 | {"n_inner": None}).d_ff == 256
    assert config_from_hf(GPT2 | {"n_inner": 100}).d_ff == 100
    assert config_from_hf(GPT2 | {"scale_attn_weights": False}).attention_scale == 1.0
    assert not config_from_hf(OPT | {"enable_bias": False}).qkv_bias


def test_slopes_of_mpt_are_powers_of_two_in_turn_if_heads_are_no_power_of_two():
    config = config_from_hf(MPT)
    assert config.alibi == tuple(2.0**-i for i in range(1, 9)) and config.rope == NOPE
    assert (config.norm, config.mlp, config.d_ff, config.tie_embeddings) == ("layer_no_bias", "gelu", 256, True)
    assert config_from_hf(MPT | {"d_model": 72, "n_heads": 6}).alibi == tuple(2.0**-i for i in (2, 4, 6, 8, 1, 3))
    assert config_from_hf(MPT | {"attn_config": {"softmax_scale": 0.5, "return_dict": True}}).attention_scale == 0.5
    assert config_from_hf(MPT | {"expansion_ratio": 2}).d_ff == 128


def test_falcons_differ_in_kv_heads_norms_and_positions():
    def facts(**changes):
        config = config_from_hf(FALCON | changes)
        return config.num_kv_heads, config.norm_placement, config.qkv_bias

    grouped = {"new_decoder_architecture": True, "num_kv_heads": 2}
    assert facts() == facts(num_kv_heads=8) == (1, "parallel_shared", False)
    assert facts(multi_query=False, parallel_attn=False, bias=True) == (8, "before", True)
    assert facts(**grouped) == (2, "parallel", False)
    assert facts(**grouped, num_ln_in_parallel_attn=1) == (2, "parallel_shared", False)
    config = config_from_hf(FALCON | {"alibi": True})
    assert config.rope == NOPE and config.alibi == tuple(2.0**-i * 8**-0.5 for i in range(1, 9))
    assert config_from_hf(FALCON | {"rope_theta": 1e5}).rope == RopeConfig(theta=1e5)
    assert config_from_hf(FALCON | {"ffn_hidden_size": 100}).d_ff == 100


def test_every_fourth_layer_of_olmo3_is_full_and_has_a_rope_of_its_own():
    plain, slide = RopeConfig(theta=5e5), AttentionPattern(window=4096)
    config = config_from_hf(OLMO3)
    assert (config.pattern, config.rope) == ((slide, slide, slide, FULL), plain)
    assert (config.norm_placement, config.qk_norm) == ("after", "projection")
    scaled = config_from_hf(OLMO3 | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert scaled.rope == (plain, plain, plain, RopeConfig("linear", 5e5, 4.0))
    newer = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e3}}
    config = config_from_hf(OLMO3 | {"rope_parameters": newer, "layer_types": ["full_attention"] * 4})
    assert (config.pattern, config.rope) == (FULL, RopeConfig(theta=1e4))


def test_longrope_has_factors_for_short_and_for_long_texts():
    factors = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1, 2, 4]}
    values = PHI3 | {"partial_rotary_factor": 0.75, "max_position_embeddings": 131072}
    expected = RopeConfig(
        "longrope", 1e4, 32.0, 4096, factors=(1, 2, 4), short_factors=(1, 1.1, 1.2), partial_rotary_factor=0.75
    )
    for kind in ("longrope", "su"):
        assert config_from_hf(values | {"rope_scaling": {"type": kind, **factors}}).rope == expected
    newer = {"rope_type": "longrope", "factor": 8.0, "attention_factor": 1.3, **factors}
    assert config_from_hf(
        values | {"rope_parameters": newer, "original_max_position_embeddings": 64}
    ).rope == dataclasses.replace(expected, factor=8.0, attention_factor=1.3, original_max_len=64)


def test_a_model_cut_off_keeps_what_its_first_layers_are_made_of():
    whole = config_from_hf(GEMMA3 | {"sliding_window_pattern": 2})
    cut = whole.first_layers(3)
    assert cut.num_layers == 3 and cut.layers == whole.layers[:3]
    assert config_from_hf(LLAMA).first_layers(2) == config_from_hf(LLAMA | {"num_hidden_layers": 2})


@pytest.mark.parametrize("kind", ROPES)
def test_older_and_newer_rope_forms_mean_the_same(kind):
    form, expected = ROPES[kind]
    older = LLAMA | {"rope_theta": 5e5}
    newer = LLAMA | {"rope_parameters": form | {"rope_type": kind, "rope_theta": 5e5}}
    assert config_from_hf(older | {"rope_scaling": form | {"type": kind}}).rope == expected
    assert config_from_hf(older | {"rope_scaling": form | {"rope_type": kind}}).rope == expected
    assert config_from_hf(newer).rope == expected
    assert config_from_hf(newer | {"rope_scaling": None, "rope_theta": 1.5}).rope == expected
    assert config_from_hf(newer | {"rope_scaling": form | {"rope_type": kind, "rope_theta": 5e5}}).rope == expected


def test_rope_original_context_has_transformers_order_of_precedence():
    def original(form, **beside):
        scaling = {"rope_type": "yarn", "factor": 4.0} | form
        return rope_of(LLAMA | {"rope_scaling": scaling} | beside).original_max_len

    assert original({}) == 4096
    assert original({"original_max_position_embeddings": 256}) == 256
    assert original({"original_max_position_embeddings": 256}, original_max_position_embeddings=512) == 512


def test_yarn_raises_the_context_that_is_not_stretched_yet():
    # Qwen2.5's model card: 32,768 positions in the config, factor 4 for 131,072.
    form = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert config_from_hf(LLAMA | {"rope_scaling": form}).max_position == 4 * 4096
    form["original_max_position_embeddings"] = 512
    assert config_from_hf(LLAMA | {"rope_scaling": form}).max_position == 4096
    form["factor"] = None
    assert rope_of(LLAMA | {"rope_scaling": form}).factor == 8.0


def test_special_ids_may_be_one_several_or_none():
    assert config_from_hf(LLAMA | {"eos_token_id": [5, 7, 5]}).eos_ids == (5, 7)
    assert config_from_hf(LLAMA | {"eos_token_id": None, "bos_token_id": None}).eos_ids == ()
    assert config_from_hf(QWEN2).bos_id is None
    assert config_from_hf(LLAMA | {"eos_token_id": -1}).eos_ids == ()
    assert config_from_hf(LLAMA | {"eos_token_id": [2, -1]}).eos_ids == (2,)
    for beyond in (-1, LLAMA["vocab_size"], 10**6):  # nothing uses it
        assert config_from_hf(LLAMA | {"bos_token_id": beyond}).bos_id is None


def test_a_context_of_ministral_3_goes_on_where_its_queries_grow():
    config = config_from_hf(MINISTRAL3 | {"max_position_embeddings": 262_144})
    assert (config.max_position, config.layers[0].attention.rope.original_max_len) == (262_144, 16_384)
    assert config.query_growth == (0.1, 16_384)
    plain = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024}
    assert config_from_hf(MINISTRAL3 | {"rope_parameters": plain}).max_position == 16_384
