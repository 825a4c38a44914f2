"""The configs of golden cases with latents."""

from base_config import BASE, without

LATENTS = without(BASE, "num_key_value_heads") | {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 1e-2,  # norms of latents have 1e-6
}
DEEPSEEK_ROPE = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK = LATENTS | {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "rope_theta": 10000.0,
    "rope_scaling": DEEPSEEK_ROPE,
}
DEEPSEEK_V2 = DEEPSEEK | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "q_lora_rank": None,
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
}
DEEPSEEK_V3 = DEEPSEEK | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 11,
}
MISTRAL4 = without(DEEPSEEK, "rope_theta", "rope_scaling") | {
    "model_type": "mistral4",
    "architectures": ["Mistral4ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "norm_topk_prob": True,
    "pad_token_id": None,
    # Queries grow at positions 24 and 48.
    "rope_parameters": DEEPSEEK_ROPE
    | {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.4},
}
YOUTU = LATENTS | {
    "model_type": "youtu",
    "architectures": ["YoutuForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "tie_word_embeddings": True,
    "rope_theta": 1600000.0,
}
GLM4_MOE_LITE = without(DEEPSEEK, "first_k_dense_replace", "rope_scaling", "n_group", "topk_group") | {
    "model_type": "glm4_moe_lite",
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "norm_topk_prob": True,
    "v_head_dim": 16,
}
MINICPM3 = LATENTS | {
    "model_type": "minicpm3",
    "architectures": ["MiniCPM3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "v_head_dim": None,
    "tie_word_embeddings": True,
    "scale_emb": 3,
    "scale_depth": 1.2,
    "dim_model_base": 12,
    "rope_theta": 100.0,
    "rope_scaling": {
        "type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0, 1.5, 3.0, 4.0],
        "long_factor": [1.0, 2.0, 9.0, 9.0],
        "original_max_position_embeddings": 128,
    },
}
