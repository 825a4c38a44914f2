"""The configs of the golden cases; see make_golden.py."""

from base_config import BASE, without
from latent_configs import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE_LITE, MINICPM3, MISTRAL4, YOUTU
from recurrent_configs import RECURRENT

LLAMA = BASE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "head_dim": 16}
MISTRAL = BASE | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "rope_theta": 10000.0}
MINISTRAL = MISTRAL | {
    "model_type": "ministral",
    "architectures": ["MinistralForCausalLM"],
    "num_hidden_layers": 3,
    "head_dim": 8,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MINISTRAL3 = {name: value for name, value in MISTRAL.items() if name != "rope_theta"} | {
    "model_type": "ministral3",
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "max_position_embeddings": 512,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
QWEN2 = BASE | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000.0}
QWEN3 = BASE | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}


GEMMA = without(BASE, "hidden_act") | {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "query_pre_attn_scalar": 24,
    "sliding_window": 12,
    "tie_word_embeddings": True,
}
GEMMA2 = GEMMA | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "rope_theta": 10000.0,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 12.0,
}
GEMMA3 = GEMMA | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
GEMMA1 = BASE | {
    "model_type": "gemma",
    "architectures": ["GemmaForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 16,
    "tie_word_embeddings": True,
}
STABLELM = without(BASE, "rms_norm_eps") | {
    "model_type": "stablelm",
    "architectures": ["StableLmForCausalLM"],
    "layer_norm_eps": 1e-5,
    "hidden_size": 64,
}
COHERE = without(BASE, "rms_norm_eps") | {
    "model_type": "cohere",
    "architectures": ["CohereForCausalLM"],
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.4,
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
COHERE2 = COHERE | {"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "num_hidden_layers": 3}
OLMO2 = BASE | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "rope_theta": 500000.0}
SMOLLM3 = BASE | {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "pad_token_id": None}
OLMO3 = OLMO2 | {"model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "pad_token_id": None}
GLM4 = BASE | {
    "model_type": "glm4",
    "architectures": ["Glm4ForCausalLM"],
    "pad_token_id": None,
    "head_dim": 16,
    "attention_bias": True,
}
PHI3 = BASE | {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "pad_token_id": None,
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
    "rope_theta": 100.0,
    "rope_scaling": {
        "type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0, 1.5, 3.0],
        "long_factor": [1.0, 2.0, 9.0],
    },
}
GRANITE = BASE | {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
GPT_NEOX = without(BASE, "num_key_value_heads", "rms_norm_eps") | {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_pct": 0.5,
    "rotary_emb_base": 5000,
}
OPT = without(BASE, "num_key_value_heads", "rms_norm_eps", "hidden_act", "intermediate_size") | {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "ffn_dim": 48,
    "activation_function": "relu",
    "tie_word_embeddings": True,
    "pad_token_id": None,
}
GPT2 = {name: BASE[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")} | {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}
MPT = {name: BASE[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")} | {
    "model_type": "mpt",
    "architectures": ["MptForCausalLM"],
    "d_model": 48,
    "n_heads": 6,
    "n_layers": 2,
    "max_seq_len": 128,
    "tie_word_embeddings": True,
    "attn_config": {"softmax_scale": 0.5},
}
MIXTRAL = BASE | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
QWEN2_MOE = QWEN2 | {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
OLMOE = BASE | {
    "model_type": "olmoe",
    "architectures": ["OlmoeForCausalLM"],
    "intermediate_size": 16,
    "pad_token_id": None,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
FALCON = {name: BASE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")} | {
    "model_type": "falcon",
    "architectures": ["FalconForCausalLM"],
    "ffn_hidden_size": 48,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
GRANITEMOE = GRANITE | {
    "model_type": "granitemoe",
    "architectures": ["GraniteMoeForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GPT_OSS = BASE | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 12,
    "swiglu_limit": 1.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# The older config form, with rope_theta beside rope_scaling, and the newer, rope_parameters, are both among them.
CASES = {
    "llama-mha": without(LLAMA, "head_dim", "num_key_value_heads", "rope_theta"),
    "llama-gqa-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-mqa-biases": LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama-rope-linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-rope-dynamic": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
    "llama-rope-llama3": LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 5000.0},
    "llama-rope-llama3-new": without(LLAMA, "rope_theta") | {"rope_parameters": LLAMA3 | {"rope_theta": 5000.0}},
    "llama-rope-yarn": LLAMA
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "mistral-gqa": MISTRAL | {"sliding_window": None},
    "mistral-mqa-window": MISTRAL | {"sliding_window": 12, "num_key_value_heads": 1, "head_dim": 16},
    "mistral-rope-linear-new": without(MISTRAL, "rope_theta")
    | {"sliding_window": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "ministral-gqa-window": MINISTRAL,
    "ministral3-gqa-rope-yarn-new": MINISTRAL3,
    "qwen2-gqa-tied": QWEN2 | {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16},
    "qwen2-mha-window": QWEN2
    | {"num_key_value_heads": 4, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen2-rope-yarn-new": without(QWEN2, "rope_theta")
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
            "mscale": 1.5,
            "mscale_all_dim": 0.5,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
        },
        "head_dim": 16,
    },
    "qwen3-mha": QWEN3 | {"num_key_value_heads": 4},
    "qwen3-gqa-window-tied": QWEN3
    | {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3-mqa-biases-yarn": QWEN3
    | {
        "num_key_value_heads": 1,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "attention_factor": 1.3,
            "original_max_position_embeddings": 32,
        },
    },
    "gemma2-gqa-window-tied": GEMMA2,
    "gemma3-gqa-window-tied": GEMMA3
    | {"sliding_window_pattern": 2, "rope_theta": 10000.0, "rope_local_base_freq": 100.0},
    "gemma3-mqa-window-rope-linear-new": GEMMA3
    | {
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "final_logit_softcapping": 12.0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma-mqa-tied": GEMMA1 | {"num_key_value_heads": 1},
    "stablelm-gqa-rope-partial-biases": STABLELM | {"use_qkv_bias": True},
    "stablelm-mha-rope-partial-parallel": STABLELM
    | {"num_key_value_heads": 4, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "cohere-gqa-tied": COHERE,
    "cohere2-gqa-window-nope-tied": COHERE2
    | {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "olmo2-gqa": OLMO2,
    "olmo2-mha-biases-tied": OLMO2
    | {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    "glm4-gqa-rope-partial-biases": GLM4,
    "phi3-gqa-window-rope-long": PHI3 | {"sliding_window": 24},
    "olmo3-gqa-window-rope-linear-new": without(OLMO3, "rope_theta")
    | {
        "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "granite-gqa": GRANITE,
    "gpt_neox-mha-rope-partial-biases": GPT_NEOX,
    "opt-mha-positions-biases-tied": OPT,
    "gpt2-mha-positions-biases-tied": GPT2,
    "mpt-mha-alibi-tied": MPT,
    "mixtral-gqa-experts": MIXTRAL,
    "qwen3_moe-gqa-experts": QWEN3_MOE,
    "qwen2_moe-gqa-experts-biases": QWEN2_MOE,
    "qwen3_moe-gqa-experts-in-every-other-layer": QWEN3_MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 3},
    "qwen2_moe-gqa-experts-in-one-layer": QWEN2_MOE | {"mlp_only_layers": [0], "norm_topk_prob": True},
    "granitemoe-gqa-experts": GRANITEMOE,
    "olmoe-mha-experts": OLMOE | {"num_key_value_heads": 4},
    "gpt_oss-gqa-window-rope-yarn-experts-biases": GPT_OSS | {"swiglu_alpha": 1.3},
    "gpt_oss-mqa-window-rope-yarn-experts-mxfp4": GPT_OSS
    | {
        "num_key_value_heads": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "attention_bias": False,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    },
    "falcon-mqa-tied": FALCON,
    "falcon-gqa-two-norms-untied": FALCON
    | {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    "falcon-mha-alibi-biases-tied": FALCON
    | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True, "num_attention_heads": 2},
    "smollm3-gqa-nope-tied": SMOLLM3
    | {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True, "rope_theta": 1e4},
    "deepseek_v2-latent-rope-yarn-experts": DEEPSEEK_V2,
    "deepseek_v2-latent-experts-new": without(DEEPSEEK_V2, "rope_theta", "rope_scaling", "n_group", "topk_group")
    | {
        "q_lora_rank": 20,
        "topk_method": "greedy",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3-latent-rope-yarn-experts": DEEPSEEK_V3,
    "deepseek_v3-latent-experts-tied": without(DEEPSEEK_V3, "rope_scaling")
    | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "tie_word_embeddings": True},
    "deepseek_v32-latent-indexer-rope-yarn-experts": DEEPSEEK_V32,
    "mistral4-latent-rope-yarn-experts-new": MISTRAL4,
    "youtu-latent-tied": YOUTU,
    "glm4_moe_lite-latent-experts": GLM4_MOE_LITE,
    "minicpm3-latent-rope-long-tied": MINICPM3,
    **RECURRENT,
}
