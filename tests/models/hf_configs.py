"""Hugging Face configs of each family, for the tests that read, refuse and write them."""

from ksana_jax.core.layer_spec import RopeConfig

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def without(values, *names):
    return {key: value for key, value in values.items() if key not in names}


LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, GEMMA2, GEMMA3, SMOLLM3, GRANITE, GLM4, PHI3, OLMO3 = (
    SIZES | {"model_type": kind}
    for kind in (
        "llama",
        "mistral",
        "ministral",
        "ministral3",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "smollm3",
        "granite",
        "glm4",
        "phi3",
        "olmo3",
    )
)
GEMMA, STABLELM, COHERE, COHERE2 = (SIZES | {"model_type": kind} for kind in ("gemma", "stablelm", "cohere", "cohere2"))
GPT_NEOX = without(SIZES, "num_key_value_heads") | {"model_type": "gpt_neox"}
OPT = without(GPT_NEOX, "intermediate_size") | {"model_type": "opt", "ffn_dim": 96}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 1000,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 4096,
    "eos_token_id": 0,
}
MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE = (
    SIZES | {"model_type": kind} for kind in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
)
KIMI = without(SIZES, "max_position_embeddings") | {"model_type": "kimi_linear", "num_key_value_heads": 8}
KIMI |= {"layer_types": [*["linear_attention"] * 3, "full_attention"]}
GPT_OSS = SIZES | {"model_type": "gpt_oss", "num_local_experts": 8}
MPT = {"model_type": "mpt", "vocab_size": 1000, "d_model": 64, "n_layers": 4, "n_heads": 8, "max_seq_len": 4096}
FALCON = without(SIZES, "intermediate_size", "num_key_value_heads") | {"model_type": "falcon"}
ROPES = {
    "default": ({}, RopeConfig(theta=5e5)),
    "linear": ({"factor": 4}, RopeConfig("linear", 5e5, 4.0)),
    "dynamic": ({"factor": 4.0, "original_max_position_embeddings": 7}, RopeConfig("dynamic", 5e5, 4.0, 4096)),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024},
        RopeConfig("llama3", 5e5, 8.0, 1024),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16, "mscale": 1.2, "truncate": False},
        RopeConfig("yarn", 5e5, 4.0, 1024, beta_fast=16.0, mscale=1.2, truncate=False),
    ),
}
