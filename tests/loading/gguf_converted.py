"""Checkpoints of Hugging Face as llama.cpp's converter writes them, for families with other tensors than a Llama's.

Source: llama.cpp, conversion/ (convert_hf_to_gguf.py before). Written from configs and tensors alone, without this
package.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from tests.gguf_writer import write_gguf

ARCHITECTURES = {"gpt_neox": "gptneox", "cohere": "command-r", "gpt_oss": "gpt-oss"}
LATENT = ("deepseek_v2", "deepseek_v3", "youtu")
WITH_LATENTS = (*LATENT, "minicpm3")
ARCHITECTURES |= dict.fromkeys(LATENT, "deepseek2")
LLAMA = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output",
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}  # fmt: skip
UNGATED = {"mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down", "lm_head": "output"}
# GGUF names by names of modules, without those of layers.
NAMES: dict[str, dict[str, str]] = {
    "gpt_neox": UNGATED | {
        "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
    },
    "falcon": UNGATED | {
        "transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm", "input_layernorm": "attn_norm",
        "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2", "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
    },
    "mpt": {
        "transformer.wte": "token_embd", "transformer.norm_f": "output_norm",
        "norm_1": "attn_norm", "norm_2": "ffn_norm",
        "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output", "ffn.up_proj": "ffn_up", "ffn.down_proj": "ffn_down",
    },
    "gpt2": {
        "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
        "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    },
    "stablelm": LLAMA,
    "cohere": LLAMA,
    "cohere2": LLAMA,
    "granitemoe": LLAMA | {
        "block_sparse_moe.router.layer": "ffn_gate_inp", "block_sparse_moe.output_linear": "ffn_down_exps",
    },
    **dict.fromkeys(WITH_LATENTS, LLAMA | {
        "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b", "mlp.gate": "ffn_gate_inp",
        **{f"mlp.shared_experts.{x}_proj": f"ffn_{x}_shexp" for x in ("gate", "up", "down")},
    }),
    "gpt_oss": LLAMA | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}  # fmt: skip


def metadata_of(values: dict[str, Any]) -> dict[str, Any]:
    family = values["model_type"]
    get = lambda *names, default=None: next((values[n] for n in names if values.get(n) is not None), default)  # noqa: E731
    width, heads = get("hidden_size", "n_embd", "d_model"), get("num_attention_heads", "n_head", "n_heads")
    head_dim, rope = get("head_dim", default=width // heads), values.get("rope_parameters") or values
    kv_heads = get("num_kv_heads", "num_key_value_heads", default=heads)
    if family == "falcon":
        kv_heads = kv_heads if values.get("new_decoder_architecture") else 1
    keys: dict[str, Any] = {
        "context_length": get("max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        "embedding_length": width,
        "block_count": get("num_hidden_layers", "n_layer", "n_layers"),
        "feed_forward_length": get("intermediate_size", "ffn_hidden_size", "n_inner", default=4 * width),
        "attention.head_count": heads,
    }
    eps = get("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", default=1e-5)
    keys[f"attention.layer_norm_{'rms_' * (family in ('gpt_oss', 'granitemoe'))}epsilon"] = float(eps)
    if family not in ("gpt_neox", "mpt", "gpt2"):
        keys["attention.head_count_kv"] = kv_heads
    if family not in ("mpt", "gpt2"):
        part = get("rotary_pct", "partial_rotary_factor", default=0.25 if family in ("gpt_neox", "stablelm") else 1)
        keys["rope.dimension_count"] = int(part * head_dim)
        keys["rope.freq_base"] = float(
            rope.get("rotary_emb_base", rope.get("rope_theta", 5e5 if family == "cohere" else 1e4))
        )
    if family in ("gpt_neox", "stablelm"):
        keys["use_parallel_residual"] = np.bool_(values.get("use_parallel_residual", True))
    if family == "falcon":
        keys["tensor_data_layout"] = "jploski"
    if family == "mpt":
        keys["attention.max_alibi_bias"] = 8.0
    if family.startswith("cohere"):
        keys |= {"logit_scale": float(values.get("logit_scale", 0.0625)), "rope.scaling.type": "none"}
    if family in ("cohere2", "gpt_oss"):
        keys["attention.sliding_window"] = values["sliding_window"]
    if family == "gpt_oss":
        scaling = values["rope_scaling"]
        keys |= {
            "expert_count": values["num_local_experts"], "expert_used_count": values["num_experts_per_tok"],
            "expert_feed_forward_length": values["intermediate_size"], "attention.key_length": head_dim,
            "attention.value_length": head_dim, "rope.scaling.type": "yarn", "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": scaling["beta_fast"], "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
        }  # fmt: skip
    if family == "granitemoe":
        keys |= {
            "expert_count": values["num_local_experts"], "expert_used_count": values["num_experts_per_tok"],
            "embedding_scale": values["embedding_multiplier"], "attention.scale": values["attention_multiplier"],
            "residual_scale": values["residual_multiplier"], "logit_scale": values["logits_scaling"],
        }  # fmt: skip
    if family == "minicpm3":
        keys |= {
            "attention.layer_norm_rms_epsilon": keys.pop("attention.layer_norm_epsilon"),
            "vocab_size": values["vocab_size"], "attention.kv_lora_rank": values["kv_lora_rank"],
            "attention.q_lora_rank": values["q_lora_rank"], "rope.dimension_count": values["qk_rope_head_dim"],
            "attention.key_length": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
        }  # fmt: skip
        del keys["rope.freq_base"]  # which is 10,000 in the published model
    if family in LATENT:
        rank, rotated = values["kv_lora_rank"], values["qk_rope_head_dim"]
        scaling = values.get("rope_scaling") or {}
        keys |= {
            "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": keys.pop("attention.layer_norm_epsilon"),
            "leading_dense_block_count": values.get("first_k_dense_replace", values["num_hidden_layers"]),
            "vocab_size": values["vocab_size"], "attention.kv_lora_rank": rank, "attention.key_length": rank + rotated,
            "attention.value_length": rank, "attention.key_length_mla": values["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": values["v_head_dim"], "rope.dimension_count": rotated,
            "expert_feed_forward_length": get("moe_intermediate_size", "intermediate_size"),
            "expert_shared_count": values.get("n_shared_experts", 0),
        }  # fmt: skip
        named = {
            "q_lora_rank": "attention.q_lora_rank", "n_routed_experts": "expert_count", "n_group": "expert_group_count",
            "num_experts_per_tok": "expert_used_count", "topk_group": "expert_group_used_count",
            "routed_scaling_factor": "expert_weights_scale",
        }  # fmt: skip
        keys |= {key: values[name] for name, key in named.items() if values.get(name) is not None}
        if values.get("norm_topk_prob"):
            keys["expert_weights_norm"] = np.bool_(True)
        if scaling:
            keys |= {
                "rope.scaling.type": "yarn", "rope.scaling.factor": scaling["factor"],
                "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
                "rope.scaling.yarn_beta_fast": scaling["beta_fast"],
                "rope.scaling.yarn_beta_slow": scaling["beta_slow"],
                "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
            }  # fmt: skip
        if family == "deepseek_v3":
            keys["expert_gating_func"] = 2
    architecture = ARCHITECTURES.get(family, family)
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in keys.items()}


def qkv_in_turn(values: dict[str, Any], tensor: np.ndarray) -> np.ndarray:
    """Rows of all queries, then keys, then values, from rows of heads or of kv heads in turn."""
    heads, rest = values["num_attention_heads"], tensor.shape[1:]
    if values["model_type"] == "gpt_neox":
        return tensor.reshape(heads, 3, -1, *rest).swapaxes(0, 1).reshape(tensor.shape)
    kv_heads = values["num_kv_heads"] if values.get("new_decoder_architecture") else 1
    groups = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, *rest)
    return np.concatenate([groups[:, part].reshape(-1, *rest) for part in (slice(None, -2), -2, -1)])


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """Blocks [E, out, in / 32, 16] of neighbours as GGUF's, whose bytes have codes i and i + 16."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    made = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return "MXFP4", (*blocks.shape[:2], blocks.shape[2] * 32), np.ascontiguousarray(made).tobytes()


def tensors_of(values: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    family, found = values["model_type"], {}
    for name, tensor in tensors.items():
        layer = re.search(r"(?:layers|h|blocks)\.(\d+)\.(.+)", name)
        prefix, module = (f"blk.{layer[1]}.", layer[2]) if layer else ("", name)
        if family in LATENT and ".experts." in name:
            index, part = re.fullmatch(r"mlp\.experts\.(\d+)\.(.+)_proj\.weight", module).groups()
            found.setdefault(f"{prefix}ffn_{part}_exps.weight", {})[int(index)] = tensor
            continue
        if family in LATENT and module.endswith("kv_b_proj.weight"):
            heads = tensor.reshape(values["num_attention_heads"], -1, tensor.shape[1])
            k, v = np.split(heads, [values["qk_nope_head_dim"]], axis=1)
            found[f"{prefix}attn_k_b.weight"] = np.ascontiguousarray(k.swapaxes(1, 2))
            found[f"{prefix}attn_v_b.weight"] = np.ascontiguousarray(v)
            continue
        if module.endswith("e_score_correction_bias"):
            found[f"{prefix}exp_probs_b.bias"] = tensor.astype(np.float32)
            continue
        if ".experts." in name:
            part = module.removeprefix("mlp.experts.")
            if part.endswith("_scales"):
                continue
            both = (
                [("gate", slice(0, None, 2)), ("up", slice(1, None, 2))]
                if "gate_up" in part
                else [("down", slice(None))]
            )
            for of, rows in both:
                gguf = f"{prefix}ffn_{of}_exps."
                if part.endswith("_bias"):
                    found[f"{gguf}bias"] = tensor[:, rows].astype(np.float32)
                elif part.endswith("_blocks"):
                    scales = tensors[name.replace("_blocks", "_scales")]
                    found[f"{gguf}weight"] = mxfp4(tensor[:, rows], scales[:, rows])
                else:
                    found[f"{gguf}weight"] = np.ascontiguousarray(tensor.swapaxes(1, 2)[:, rows])
            continue
        if module == "self_attn.sinks":
            found[f"{prefix}attn_sinks.weight"] = tensor.astype(np.float32)
            continue
        stem, _, kind = module.rpartition(".")
        if stem.endswith("input_linear"):
            for of, half in zip(("gate", "up"), np.split(tensor, 2, axis=1), strict=True):
                found[f"{prefix}ffn_{of}_exps.weight"] = np.ascontiguousarray(half)
            continue
        if family == "granitemoe" and stem.endswith(("q_proj", "k_proj")):
            heads = values["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if family == "gpt2" and stem.rpartition(".")[2].startswith("c_") and kind == "weight":
            tensor = tensor.T
        if "query_key_value" in stem:
            tensor = qkv_in_turn(values, tensor)
        to = np.float32 if tensor.ndim == 1 or "router" in stem or "wpe" in stem else tensor.dtype
        found[f"{prefix}{NAMES[family][stem]}.{kind}"] = np.ascontiguousarray(tensor.astype(to))
    for name in ("long", "short") if family == "minicpm3" else ():
        factors = np.array((values["rope_scaling"] or {}).get(f"{name}_factor", ()), np.float32)
        found |= {f"rope_factors_{name}.weight": factors} if len(factors) else {}
    stacks = {name: np.stack([x for _, x in sorted(t.items())]) for name, t in found.items() if isinstance(t, dict)}
    return found | stacks


def convert(folder: Path, out: Path, changes: dict[str, Any] | None = None, **keys: Any) -> Path:
    """Writes a checkpoint as a GGUF file without a tokenizer. changes: of its config. keys: further ones, with __."""
    values = json.loads((folder / "config.json").read_text()) | (changes or {})
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    metadata = metadata_of(values)
    more = {f"{metadata['general.architecture']}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return write_gguf(out, metadata | more, tensors_of(values, tensors))
