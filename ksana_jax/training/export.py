"""Writes a trained model as a Hugging Face Llama directory. Knows files, no training."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ksana_jax.config import ModelConfig
from ksana_jax.models.transformer import Params

_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "w_q": "self_attn.q_proj", "w_k": "self_attn.k_proj", "w_v": "self_attn.v_proj",
    "w_o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "w_gate": "mlp.gate_proj",
    "w_up": "mlp.up_proj", "w_down": "mlp.down_proj",
}  # fmt: skip


def hf_tensors(params: Params) -> dict[str, np.ndarray]:
    """Weights in float32 by their Hugging Face names; matrices are [out, in] on both sides."""
    tensors = {"model.embed_tokens.weight": params.embed, "model.norm.weight": params.final_norm}
    for index, layer in enumerate(params.layers):
        for ours, theirs in _LAYER_NAMES.items():
            tensors[f"model.layers.{index}.{theirs}.weight"] = getattr(layer, ours)
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}


def hf_config(config: ModelConfig) -> dict:
    """config.json of a Llama model with tied embeddings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_ids[0],
        "torch_dtype": "float32",
    }


def export_model(directory: Path, params: Params, config: ModelConfig, files: dict[str, bytes]) -> None:
    """Writes the model; each file is replaced in one step, the weights last, so that a reader never sees half of one.

    Args:
      files: what else belongs into the directory, by name: tokenizer, log, card.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generation = {"bos_token_id": config.bos_id, "eos_token_id": config.eos_ids[0], "do_sample": False}
    contents = {
        **files,
        "config.json": _json(hf_config(config)),
        "generation_config.json": _json(generation),
        "model.safetensors": save(hf_tensors(params), metadata={"format": "pt"}),
    }
    for name, content in contents.items():
        temporary = directory / f".{name}.tmp"
        temporary.write_bytes(content)
        os.replace(temporary, directory / name)


def _json(value: dict) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
