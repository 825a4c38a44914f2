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
RECURRENT = {
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
