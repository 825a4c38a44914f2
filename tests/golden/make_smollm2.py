"""Makes tests/golden/smollm2.json: facts of a real model's GGUF file by gguf and transformers.

In an environment of its own, with the Python that runs the tests, whose documentation is the text:

  pip install gguf==0.19.0 torch==2.13.0 transformers==5.19.0 safetensors
  python tests/golden/make_smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf          (a minute on two cores)

"weights" is the SHA-256 of all weights in float32, in the order of their Hugging Face names. "log_probs" has the
log-probability of every STEP-th token given those before it. Neither tokens nor text are stored: "sha256" tells whether
another Python has the same text. gguf 0.19.0, transformers 5.19.0 and torch 2.13.0 made the committed file.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

FIRST, LAST, NUM_TOKENS, STEP = 20_000, 30_000, 2_000, 10
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def value(reader: GGUFReader, key: str):
    return reader.fields[key].contents()


def weights(reader: GGUFReader) -> dict[str, np.ndarray]:
    """Float32 weights by Hugging Face name, rows of queries and keys in Hugging Face's order."""
    found = {}
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(tensor.shape[::-1].tolist())
        if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name):
            if layer[2] in ("attn_q", "attn_k"):
                heads = value(reader, f"llama.attention.head_count{'_kv' * (layer[2] == 'attn_k')}")
                rows, columns = values.shape
                apart = values.reshape(heads, rows // heads // 2, 2, columns)
                values = np.ascontiguousarray(apart.swapaxes(1, 2)).reshape(rows, columns)
            found[f"model.layers.{layer[1]}.{NAMES[layer[2]]}.weight"] = values
        else:
            found[
                {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[
                    tensor.name
                ]
            ] = values
    return found


def tokens(reader: GGUFReader, text: str) -> list[int]:
    """Ids of an ASCII text by the file's vocabulary: digits apart, then GPT-2's words."""
    vocabulary = {token: i for i, token in enumerate(value(reader, "tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ")) for merge in value(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    return ids[:NUM_TOKENS]


def log_probs(reader: GGUFReader, found: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """Log-probabilities of all tokens but the first, in float64 from float32 logits of transformers."""
    config = LlamaConfig(
        vocab_size=len(found["model.embed_tokens.weight"]),
        hidden_size=value(reader, "llama.embedding_length"),
        intermediate_size=value(reader, "llama.feed_forward_length"),
        num_hidden_layers=value(reader, "llama.block_count"),
        num_attention_heads=value(reader, "llama.attention.head_count"),
        num_key_value_heads=value(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=value(reader, "llama.context_length"),
        rms_norm_eps=float(f"{value(reader, 'llama.attention.layer_norm_rms_epsilon'):.7g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(value(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_file(found, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def main() -> None:
    reader = GGUFReader(sys.argv[1])
    found = weights(reader)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(found[name].tobytes())
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()[FIRST:LAST]
    ids = tokens(reader, text)
    scored = log_probs(reader, found, ids)
    facts = {
        "file": hashlib.sha256(Path(sys.argv[1]).read_bytes()).hexdigest(),
        "weights": digest.hexdigest(),
        "text": [FIRST, LAST],
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "step": STEP,
        "log_probs": [round(float(p), 6) for p in scored[::STEP]],
    }
    if len(sys.argv) > 2:  # all of them, for a closer look
        np.savez(sys.argv[2], ids=ids, log_probs=scored)
    path = Path(__file__).with_name("smollm2.json")
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(path, "mean", scored.mean())


if __name__ == "__main__":
    main()
