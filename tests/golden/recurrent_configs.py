"""The configs of golden cases with recurrent layers."""

from base_config import BASE, without

LFM2 = without(BASE, "rms_norm_eps", "hidden_act") | {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "num_hidden_layers": 4,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
OLMO_HYBRID = BASE | {
    "model_type": "olmo_hybrid",
    "architectures": ["OlmoHybridForCausalLM"],
    "num_hidden_layers": 4,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,  # as many channels as keys have: transformers 5.24.0 saves convolutions in equal thirds
}
# Fewer heads of queries and keys than of values, a part of a head that is rotated, norms that add 1. The eps bounds how
# far the norm of a result enlarges rounding, where the sum that it normalises cancels.
QWEN3_NEXT = BASE | {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rms_norm_eps": 0.01,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}
QWEN3_5 = QWEN3_NEXT | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}
QWEN_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
GRANITE = BASE | {
    "model_type": "granitemoehybrid",
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "rms_norm_eps": 0.01,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "mamba_d_head": 8,
    "mamba_expand": 2,
}
# The form of the published config: layers count from 1.
KIMI = without(BASE, "max_position_embeddings", "rope_theta") | {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "model_max_length": 128,
    "pad_token_id": None,
    "head_dim": 11,  # read by nothing, as 72 in the published one
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "mla_use_nope": True,
    "rms_norm_eps": 0.01,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "linear_attn_config": {
        "full_attn_layers": [3],
        "kda_layers": [1, 2, 4],
        "num_heads": 3,
        "head_dim": 6,
        "short_conv_kernel_size": 4,
    },
}
RECURRENT = {
    "kimi_linear-delta-latent-experts": KIMI,
    "granitemoehybrid-mamba-experts": GRANITE
    | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 16},
    "granitemoehybrid-mamba-dense-tied": GRANITE
    | {
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "mamba_conv_bias": False,
        "tie_word_embeddings": True,
    },
    "qwen3_next-gated-delta-experts": QWEN3_NEXT | QWEN_EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen3_5-gated-delta-tied": QWEN3_5 | {"tie_word_embeddings": True},
    "qwen3_5_moe-gated-delta-experts": without(QWEN3_5, "intermediate_size")
    | QWEN_EXPERTS
    | {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]},
    "olmo_hybrid-delta-tied": OLMO_HYBRID
    | {"rope_parameters": None, "linear_allow_neg_eigval": False, "tie_word_embeddings": True},
    "lfm2-gqa-conv-tied": LFM2 | {"tie_word_embeddings": True},
    "lfm2-mha-conv-biases": LFM2
    | {
        "num_key_value_heads": 4,
        "conv_bias": True,
        "conv_L_cache": 4,
        "layer_types": ["full_attention", "conv", "conv", "full_attention"],
        "intermediate_size": 70,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 16,
        "tie_word_embeddings": False,
    },
}
