"""Invalid configs are refused with file, field and supported values."""

import math

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.core.layer_spec import RopeConfig
from ksana_jax.models.families import config_from_hf
from ksana_jax.models.frequencies import make_rope
from tests.models.hf_configs import (
    FALCON,
    GEMMA2,
    GEMMA3,
    GLM4,
    GPT2,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    LLAMA,
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
    SIZES,
    SMOLLM3,
    without,
)

# What is changed in a config, and what the message must name.
REFUSED = [
    (LLAMA, {"model_type": "gptj"}, ["'gptj'", "llama", "mistral", "qwen2", "qwen3"]),
    (LLAMA, {"model_type": None}, ["model_type is None", "LlamaForCausalLM"]),
    (LLAMA, {"model_type": ["llama"]}, ["model_type"]),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "supported"]),
    (LLAMA, {"architectures": ["MistralForCausalLM"]}, ["'llama'", "'MistralForCausalLM'"]),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, ["architectures", "list"]),
    (LLAMA, {"num_attention_heads": 0}, ["num_attention_heads is 0", "integer from 1"]),
    (LLAMA, {"num_key_value_heads": 0}, ["num_key_value_heads is 0"]),
    (LLAMA, {"num_key_value_heads": 3}, ["num_attention_heads is 8", "multiple of num_key_value_heads 3"]),
    (LLAMA, {"num_key_value_heads": 16}, ["num_attention_heads is 8", "multiple of num_key_value_heads 16"]),
    (LLAMA, {"hidden_size": 60}, ["hidden_size is 60", "multiple of num_attention_heads 8"]),
    (LLAMA, {"hidden_size": "64"}, ["hidden_size is '64'"]),
    (LLAMA, {"hidden_size": 64.0}, ["hidden_size is 64.0"]),
    (LLAMA, {"vocab_size": True}, ["vocab_size is True"]),
    (LLAMA, {"num_hidden_layers": -1}, ["num_hidden_layers is -1"]),
    (LLAMA, {"num_hidden_layers": 10**9}, ["num_hidden_layers is 1,000,000,000", "10,000"]),
    (LLAMA, {"intermediate_size": 2**40}, ["intermediate_size", "2,147,483,647"]),
    (LLAMA, {"head_dim": 7}, ["head_dim is 7", "even"]),
    (LLAMA, {"head_dim": 0}, ["head_dim is 0"]),
    (LLAMA, {"max_position_embeddings": None}, ["max_position_embeddings is None"]),
    (LLAMA, {"rms_norm_eps": 0.0}, ["rms_norm_eps is 0.0", "a finite number above 0"]),
    (LLAMA, {"rms_norm_eps": math.nan}, ["rms_norm_eps is nan"]),
    (LLAMA, {"rope_theta": math.nan}, ["rope_theta is nan", "a finite number above 0"]),
    (LLAMA, {"rope_theta": math.inf}, ["rope_theta is inf"]),
    (LLAMA, {"rope_theta": -1}, ["rope_theta is -1"]),
    (LLAMA, {"rope_theta": 5e-324}, ["rope_theta is 5e-324", "from 1 to 1e+15"]),
    (LLAMA, {"rope_theta": 1e300}, ["rope_theta is 1e+300"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 1e-300}}, ["rope_scaling.factor is 1e-300", "from 0.001"]),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1e300}},
        ["rope_scaling.attention_factor is 1e+300"],
    ),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1e-300, "high_freq_factor": 4}},
        ["rope_parameters.low_freq_factor is 1e-300"],
    ),
    (LLAMA, {"rope_theta": None}, ["rope_theta is None"]),
    (
        LLAMA,
        {"rope_scaling": {"type": "axial", "factor": 2.0}},
        ["rope_scaling type is 'axial'", "default, linear, dynamic, llama3, yarn, longrope"],
    ),
    (LLAMA, {"rope_parameters": {"rope_type": "mrope"}}, ["rope_parameters type is 'mrope'"]),
    (LLAMA, {"rope_scaling": {"type": ["yarn"]}}, ["rope_scaling type is ['yarn']"]),
    (LLAMA, {"rope_scaling": "linear"}, ["rope_scaling is 'linear'", "object"]),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor is None"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, ["rope_scaling.factor is 0"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}}, ["'alpha'", "supported"]),
    (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, ["rope_scaling.type"]),
    (
        LLAMA,
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        ["rope_scaling and rope_parameters disagree"],
    ),
    (LLAMA, {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, ["rope_parameters.low_freq_factor is None"]),
    (
        LLAMA,
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
        ["rope_scaling.high_freq_factor is 4.0", "low_freq_factor 4.0"],
    ),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
        ["rope_scaling.original_max_position_embeddings is 0"],
    ),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": -1.0}}, ["attention_factor is -1.0"]),
    (LLAMA, {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_theta is 1.0"]),
    (QWEN3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["'full_attention'", "supported"]),
    (LLAMA, {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
    (LLAMA, {"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5", "1.0"]),
    (LLAMA, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    (LLAMA, {"sliding_window": 64}, ["sliding_window is 64", "mistral"]),
    (LLAMA, {"layer_types": ["sliding_attention"] * 4}, ["layer_types"]),
    (LLAMA, {"attention_bias": "yes"}, ["attention_bias is 'yes'", "true or false"]),
    (LLAMA, {"tie_word_embeddings": 1}, ["tie_word_embeddings is 1"]),
    (LLAMA, {"eos_token_id": 1000}, ["eos_token_id is 1,000", "vocab_size 1000"]),
    (LLAMA, {"eos_token_id": [2, -2]}, ["eos_token_id is [2, -2]"]),
    (LLAMA, {"bos_token_id": "<s>"}, ["bos_token_id is '<s>'"]),
    (MISTRAL, {"sliding_window": 0}, ["sliding_window is 0"]),
    (MISTRAL, {"attention_bias": True}, ["attention_bias is True", "false"]),
    (MISTRAL, {"sliding_window": 64, "layer_types": ["full_attention"] * 4}, ["layer_types", "sliding_window 64"]),
    (QWEN2, {"mlp_bias": True}, ["mlp_bias is True"]),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": -1}, ["max_window_layers is -1"]),
    (QWEN2, {"use_sliding_window": True, "sliding_window": -5}, ["sliding_window is -5"]),
    (QWEN3, {"layer_types": ["full_attention"] * 3}, ["layer_types", "4 layers"]),
    (QWEN3, {"layer_types": ["chunked_attention"] * 4}, ["chunked_attention", "sliding_attention"]),
    (QWEN3, {"layer_types": ["sliding_attention"] * 4}, ["layer_types", "use_sliding_window"]),
    (GEMMA2, {"hidden_activation": "silu"}, ["hidden_activation is 'silu'", "gelu_pytorch_tanh"]),
    (GEMMA2, {"attn_logit_softcapping": 0.0}, ["attn_logit_softcapping is 0.0"]),
    (GEMMA2, {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "false"]),
    (GEMMA2, {"sliding_window": None}, ["sliding_window is None"]),
    (GEMMA2, {"layer_types": ["full_attention"] * 3}, ["layer_types", "4 layers"]),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping is 50.0", "gemma2"]),
    (GEMMA3, {"rope_parameters": {"full_attention": {"rope_type": "mrope"}}}, ["rope_parameters.full_attention type"]),
    (GEMMA3, {"rope_parameters": {"full_attention": 3}}, ["rope_parameters.full_attention is 3", "object"]),
    (GEMMA3, {"rope_parameters": {"full_attention": {}, "linear_attention": {}}}, ["linear_attention"]),
    (GEMMA3, {"rope_local_base_freq": -1}, ["rope_local_base_freq is -1"]),
    (SMOLLM3, {"no_rope_layers": [1, 0]}, ["no_rope_layers", "4 layers"]),
    (SMOLLM3, {"no_rope_layers": [1, 2, 1, 1]}, ["no_rope_layers is [1, 2, 1, 1]", "0 or 1"]),
    (SMOLLM3, {"no_rope_layer_interval": 0}, ["no_rope_layer_interval is 0"]),
    (PHI3, {"rope_scaling": {"type": "longrope", "long_factor": [1, 2, 3, 4]}}, ["rope_scaling.short_factor is None"]),
    (
        PHI3,
        {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 3, "short_factor": [1.0] * 4}},
        ["rope has 3 factors, must have 4"],
    ),
    (
        PHI3,
        {"rope_scaling": {"type": "longrope", "long_factor": [0.0] * 4, "short_factor": [1.0] * 4}},
        ["rope_scaling.long_factor is [0.0, 0.0"],
    ),
    (PHI3, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling type is 'yarn'", "longrope"]),
    (OLMO3, {"rope_theta": 1e4}, ["rope_theta is 10,000.0", "500000", "rope_parameters"]),
    (OLMO3, {"rope_parameters": {"rope_theta": 1e4}}, ["rope_parameters", "full_attention and sliding_attention"]),
    (OLMO3, {"layer_types": ["full_attention"] * 3}, ["layer_types", "4 layers"]),
    (OLMO3, {"sliding_window": None}, ["sliding_window is None"]),
    (PHI3, {"rope_scaling": {"type": "su", "rope_type": "default"}}, ["rope_scaling.type is 'su'"]),
    (PHI3, {"sliding_window": 0}, ["sliding_window is 0"]),
    (GLM4, {"partial_rotary_factor": 0.01}, ["rotates 1 of head_dim 128", "even number from 2"]),
    (GLM4, {"partial_rotary_factor": 1.5}, ["partial_rotary_factor is 1.5"]),
    (GLM4, {"mlp_bias": True}, ["mlp_bias is True"]),
    (GRANITE, {"logits_scaling": 0}, ["logits_scaling is 0"]),
    (GRANITE, {"residual_multiplier": None}, ["residual_multiplier is None"]),
    (GRANITE, {"attention_multiplier": -1.0}, ["attention_multiplier is -1.0"]),
    (GRANITE, {"sliding_window": 64}, ["sliding_window is 64"]),
    (GPT_NEOX, {"rotary_pct": 1.5}, ["rotary_pct is 1.5", "from 0.001 to 1"]),
    (GPT_NEOX, {"layer_norm_eps": 0}, ["layer_norm_eps is 0", "above 0"]),
    (GPT_NEOX, {"rms_norm_eps": 1e-5}, ["rms_norm_eps is 1e-05", "is named layer_norm_eps here"]),
    (GPT_NEOX, {"num_key_value_heads": 2}, ["num_key_value_heads is 2", "must be absent"]),
    (GPT_NEOX, {"hidden_act": "silu"}, ["hidden_act is 'silu'", "gelu"]),
    (GPT_NEOX, {"use_parallel_residual": "yes"}, ["use_parallel_residual is 'yes'", "true or false"]),
    (OPT, {"do_layer_norm_before": False}, ["do_layer_norm_before is False", "true"]),
    (OPT, {"word_embed_proj_dim": 32}, ["word_embed_proj_dim is 32", "64, the hidden_size"]),
    (OPT, {"layer_norm_elementwise_affine": False}, ["layer_norm_elementwise_affine is False"]),
    (OPT, {"_remove_final_layer_norm": True}, ["_remove_final_layer_norm is True"]),
    (OPT, {"rope_theta": 1e4}, ["rope_theta is 10,000.0", "supported: none"]),
    (OPT, {"ffn_dim": 0}, ["ffn_dim is 0"]),
    (GPT2, {"n_embd": 60}, ["n_embd is 60", "multiple of num_attention_heads 8"]),
    (GPT2, {"n_inner": -1}, ["n_inner is -1"]),
    (GPT2, {"n_positions": None}, ["n_positions is None"]),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx is True", "false"]),
    (GPT2, {"add_cross_attention": True}, ["add_cross_attention is True"]),
    (GPT2, {"hidden_size": 32}, ["hidden_size is 32", "is named n_embd here"]),
    (MIXTRAL, {"num_local_experts": 0}, ["num_local_experts is 0"]),
    (MIXTRAL, {"num_experts_per_tok": 9}, ["num_experts_per_tok is 9", "at most num_local_experts 8"]),
    (MIXTRAL, {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
    (MIXTRAL, {"scoring_func": "sigmoid"}, ["scoring_func is 'sigmoid'", "softmax"]),
    (MIXTRAL, {"routed_scaling_factor": 2.5}, ["routed_scaling_factor is 2.5", "1.0"]),
    (GRANITE | {"model_type": "granitemoe"}, {"mlp_bias": True}, ["mlp_bias is True", "False"]),
    (OLMOE, {"clip_qkv": 8.0}, ["clip_qkv is 8.0", "null"]),
    (OLMOE, {"n_shared_experts": 1}, ["n_shared_experts is 1"]),
    (QWEN3_MOE, {"mlp_only_layers": [1, -1]}, ["mlp_only_layers is [1, -1]", "list of layers, counted from 0"]),
    (QWEN3_MOE, {"decoder_sparse_step": 0}, ["decoder_sparse_step is 0", "integer from 1"]),
    (QWEN3_MOE, {"num_experts": 8, "num_local_experts": 4}, ["num_local_experts is 4", "num_experts is 8"]),
    (QWEN2_MOE, {"use_sliding_window": True}, ["use_sliding_window is True", "false"]),
    (QWEN2_MOE, {"shared_expert_intermediate_size": 0}, ["shared_expert_intermediate_size is 0"]),
    (GPT_OSS, {"num_experts": 4}, ["num_experts is 4", "num_local_experts is 8"]),
    (GPT_OSS, {"experts_per_token": 2}, ["experts_per_token is 2", "num_experts_per_tok 4"]),
    (GPT_OSS, {"initial_context_length": 8192}, ["initial_context_length is 8,192", "is 4096"]),
    (GPT_OSS, {"swiglu_limit": 0}, ["swiglu_limit is 0", "above 0"]),
    (GPT_OSS, {"swiglu_alpha": None}, ["swiglu_alpha is None"]),
    (GPT_OSS, {"sliding_window": None}, ["sliding_window is None"]),
    (GPT_OSS, {"layer_types": ["full_attention"] * 3}, ["layer_types", "4 layers"]),
    (GPT_OSS, {"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
    (GPT_OSS, {"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.factor is None"]),
    (MPT, {"attn_config": {"clip_qkv": 6.0}}, ["attn_config.clip_qkv is 6.0", "supported: None"]),
    (MPT, {"attn_config": {"alibi": False}}, ["attn_config.alibi is False", "True"]),
    (MPT, {"attn_config": {"alibi_bias_max": 16}}, ["attn_config.alibi_bias_max is 16", "supported: 8"]),
    (MPT, {"attn_config": {"attn_type": "multiquery_attention"}}, ["multiquery_attention", "multihead_attention"]),
    (MPT, {"attn_config": {"rope": True}}, ["attn_config.rope is True", "supported: False"]),
    (MPT, {"attn_config": {"sliding_window_size": 64}}, ["attn_config.sliding_window_size is 64"]),
    (MPT, {"attn_config": {"softmax_scale": 0}}, ["attn_config.softmax_scale is 0"]),
    (MPT, {"attn_config": 3}, ["attn_config is 3", "object"]),
    (MPT, {"no_bias": False}, ["no_bias is False", "true"]),
    (MPT, {"logit_scale": "inv_sqrt_d_model"}, ["logit_scale is 'inv_sqrt_d_model'", "null"]),
    (MPT, {"norm_type": "rmsnorm"}, ["norm_type is 'rmsnorm'"]),
    (MPT, {"expansion_ratio": 0}, ["expansion_ratio is 0"]),
    (FALCON, {"new_decoder_architecture": True, "parallel_attn": False}, ["parallel_attn is False", "true"]),
    (FALCON, {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 3}, ["num_ln_in_parallel_attn is 3"]),
    (FALCON, {"num_ln_in_parallel_attn": 2}, ["num_ln_in_parallel_attn is 2", "new_decoder_architecture"]),
    (FALCON, {"new_decoder_architecture": True, "num_kv_heads": 3}, ["multiple of num_key_value_heads 3"]),
    (FALCON, {"activation": "silu"}, ["activation is 'silu'", "gelu"]),
    (SMOLLM3, {"use_sliding_window": True}, ["use_sliding_window is True", "false"]),
]


@pytest.mark.parametrize(("values", "change", "named"), REFUSED, ids=[str(change)[:70] for _, change, _ in REFUSED])
def test_config_that_cannot_be_is_refused_with_file_field_and_what_is_supported(values, change, named):
    config_from_hf(values)
    with pytest.raises(ConfigError) as refusal:
        config_from_hf(values | change, "some/config.json")
    message = str(refusal.value)
    assert message.startswith("some/config.json: ") and "\n" not in message
    for part in named:
        assert part in message


@pytest.mark.parametrize("name", [name for name in SIZES if name != "num_key_value_heads"])
def test_config_without_a_size_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        config_from_hf(without(LLAMA, name))


def test_all_problems_of_a_config_are_in_one_message():
    with pytest.raises(ConfigError) as refusal:
        config_from_hf(LLAMA | {"vocab_size": 0, "hidden_act": "relu", "rope_theta": math.nan})
    assert all(part in str(refusal.value) for part in ("vocab_size is 0", "hidden_act is 'relu'", "rope_theta is nan"))


def test_rope_of_numbers_without_finite_frequencies_is_refused():
    with pytest.raises(ValueError, match="rope has frequencies or a scale that are not finite"):
        make_rope(RopeConfig("linear", factor=1e-300), 8)
