"""Writes a Hugging Face checkpoint as a GGUF file for llama.cpp. Runs in the peers' environment."""

import json
import math
from pathlib import Path

import gguf
import numpy as np

KINDS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: Path, out: Path, dtype: str) -> None:
    """Writes the weights of a model of the Llama family, without its tokenizer: only token ids are used.

    Args:
      model: directory with config.json and safetensors.
      dtype: f32, bf16 or f16, of the matrices; norms are f32.

    Raises:
      ValueError: the model has a feature that this function does not write.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim")
    head_dim = head_dim or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (
        config["model_type"] != "llama"
        or rope.get("rope_type", rope.get("type", "default")) != "default"
        or config.get("attention_bias")
    ):
        raise ValueError("only Llama models without scaled rotations and biases are written as GGUF")
    vocab = config["vocab_size"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_vocab_size(vocab)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in _weights(model):
        weight = weight.astype(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _pair_neighbours(weight, heads if "q_proj" in name else kv_heads)
        kind = KINDS[dtype] if weight.ndim == 2 else KINDS["f32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Translates a tensor's Hugging Face name: model.layers.3.mlp.up_proj.weight is blk.3.ffn_up.weight."""
    stem, ending = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_LAYER[part]}.{ending}"
    return f"{_WHOLE[stem]}.{ending}"


def _pair_neighbours(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows [heads * H, D]: llama.cpp rotates neighbours 2i and 2i + 1, Hugging Face i and i + H / 2."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _weights(model: Path):
    """Yields names and arrays, bfloat16 as float32. NumPy has no bfloat16, and its safetensors reader none either."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, np.uint8, "r", offset=8 + size)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            raw = data[begin:end]
            if entry["dtype"] == "BF16":
                array = (raw.view("<u2").astype("<u4") << 16).view("<f4")
            else:
                array = raw.view({"F32": "<f4", "F16": "<f2"}[entry["dtype"]])
            assert array.size == math.prod(entry["shape"])
            yield name, array.reshape(entry["shape"])
