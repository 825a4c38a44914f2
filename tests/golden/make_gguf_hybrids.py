"""Makes GGUF files of models with recurrent layers, and what llama.cpp computes with them.

  python tests/golden/make_gguf_hybrids.py LLAMA_CPP [architecture ...]

LLAMA_CPP is a folder of llama.cpp's sources, such as vendor/llama.cpp of llama-cpp-python, which must be installed too,
with transformers 5.24.0. Tiny random checkpoints become files by llama.cpp's own converter, in float32; `logprobs.npz`
has tokens [T], and their log-probabilities [T, V] by llama.cpp with a cache in float32. llama-cpp-python 0.3.36 made
the committed files.
"""

import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from base_config import without
from recurrent_configs import GRANITE, KIMI, LFM2, QWEN3_5, QWEN3_NEXT
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SOURCES = Path(sys.argv[1])
sys.path[:0] = [str(SOURCES), str(SOURCES / "gguf-py")]
import conversion  # noqa: E402  in SOURCES, which has just been added to the path
import gguf  # noqa: E402

FOLDER = Path(__file__).parent / "gguf_hybrids"
# llama.cpp has heads of keys and of values of one size, and one eps, also for norms of latents and of queries and keys.
SAME = {"vocab_size": 64, "num_hidden_layers": 3, "pad_token_id": None, "rms_norm_eps": 1e-6, "intermediate_size": 40}
FULL = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
QWEN = (
    SAME | FULL | {"head_dim": 32, "linear_num_value_heads": 6, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
EXPERTS |= {"shared_expert_intermediate_size": 8}
MAMBA = {"layer_types": ["mamba", "attention", "mamba"], "mamba_d_state": 16, "mamba_d_conv": 4}
CASES = {
    "lfm2": LFM2
    | without(SAME, "rms_norm_eps")
    | {
        "norm_eps": 1e-6,
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "max_position_embeddings": 128,
    }
    | {"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "tie_word_embeddings": True},
    "qwen3next": QWEN3_NEXT | EXPERTS | QWEN,
    "qwen35": QWEN3_5 | QWEN | {"tie_word_embeddings": True},
    "qwen35moe": without(QWEN3_5 | EXPERTS | QWEN, "intermediate_size")
    | {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]},
    "granitehybrid": GRANITE
    | SAME
    | MAMBA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 8},
    "granitehybrid-dense": GRANITE | SAME | MAMBA | {"num_local_experts": 0, "tie_word_embeddings": True},
    "kimi-linear": KIMI
    | SAME
    | {"num_expert_group": 1, "num_shared_experts": 1, "num_experts": 4, "moe_intermediate_size": 8}
    | {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 4, "head_dim": 8}}
    | {"kv_lora_rank": 16},
}
CASES["kimi-linear"]["linear_attn_config"]["short_conv_kernel_size"] = 4


def write_checkpoint(folder: Path, values: dict) -> None:
    (folder / "config.json").write_text(json.dumps(values | {"dtype": "float32"}))
    model, rng = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float(), np.random.default_rng(5)
    plus_one = values["model_type"].startswith("qwen")
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        numbers = rng.integers(-99, 99, weight.shape)  # eighths and such keep their bits if 1 is added
        if "norm" in name:
            weight.data = torch.tensor((not plus_one or "linear_attn" in name) + numbers / 512)
        else:
            weight.data = torch.tensor(numbers / (64 if "embed" in name or "lm_head" in name else 256))
    model.float().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values | {"dtype": "float32"}))  # as published
    if values["model_type"] == "kimi_linear":  # and the names of layers without experts
        saved = load_file(folder / "model.safetensors")
        named = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): w for name, w in saved.items()}
        save_file(named, folder / "model.safetensors")


def without_tokenizer(model) -> None:
    model._set_vocab_none()
    model.gguf_writer.add_vocab_size(64)


def main(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(Path(scratch), CASES[name])
        kind = conversion.get_model_class(CASES[name]["architectures"][0])
        kind.no_mtp, kind.set_vocab = True, without_tokenizer
        kind(Path(scratch), gguf.LlamaFileType.ALL_F32, FOLDER / f"{name}.gguf").write()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    tokens, found = np.random.default_rng(7).integers(0, 64, 40), {}
    for name in CASES:
        if name in (sys.argv[2:] or CASES):
            main(name)
        settings = {"n_ctx": 64, "logits_all": True, "type_k": 0, "type_v": 0, "flash_attn": False, "verbose": False}
        llm = llama_cpp.Llama(str(FOLDER / f"{name}.gguf"), **settings)
        llm.eval(tokens.tolist())
        scores = torch.tensor(np.array(llm.scores[: len(tokens)], np.float32))
        found[name] = torch.log_softmax(scores, -1).numpy()
    np.savez(FOLDER / "logprobs.npz", tokens=tokens.astype(np.int32), **found)
