#!/usr/bin/env bash
# llama.cpp on the CPU: with flash attention, which it turns on by itself, a KV cache in F32 gives the numbers of one in F16.
#
# Guess: cache_type_k and cache_type_v F32 give exact keys and values, the reference to which F16 and narrower types compare.
# Seen: log-probabilities are equal to the last digit with F16 and F32, though the F32 cache takes twice the memory: keys and
# values are rounded on their way into the product. They differ only if flash attention is off, and "auto", the default, is on.
# Hurt: whoever measures the loss of a KV type against "F32": F16 looks lossless, and the reference has its error.
# Versions: Python 3.11, xllamacpp 2026.10.11549 (llama.cpp's server as a module), gguf 0.19.0, NumPy 2.4.6. Exits
# with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cd "$folder"
venv/bin/python - 2>log <<'END' || { tail -20 log >&2; exit 1; }
import json
from importlib.metadata import version

import gguf
import numpy as np
import xllamacpp

WIDTH, VOCAB = 64, 300
random = np.random.default_rng(0)


def write(path):
    """Writes a model of two layers with random weights."""
    kind = gguf.TokenType
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(1024)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(WIDTH)
    file.add_block_count(2)
    file.add_head_count(2)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("llama")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [f"t{i}" for i in range(VOCAB - len(names))]
    file.add_token_list(names)
    file.add_token_scores([0.0] * VOCAB)
    file.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * (VOCAB - 259)])
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    for name in ("token_embd", "output"):
        file.add_tensor(f"{name}.weight", random.standard_normal((VOCAB, WIDTH), np.float32))
    file.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in ("blk.0", "blk.1"):
        for name in ("attn_norm", "ffn_norm"):
            file.add_tensor(f"{layer}.{name}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            file.add_tensor(f"{layer}.{name}.weight", 0.2 * random.standard_normal((WIDTH, WIDTH), np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def scores(flash, kind):
    """Returns log-probabilities of the tokens that follow 500 random ones."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = "model.gguf", 1024, 1, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = kind
    if flash is not None:
        params.flash_attn_type = flash
    prompt = np.random.default_rng(1).integers(3, VOCAB, 500).tolist()
    asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    given = xllamacpp.Server(params).handle_completions(asked)
    given = given if isinstance(given, dict) else json.loads(given)
    return [token["logprob"] for token in given["choices"][0]["logprobs"]["content"]]


print(f"xllamacpp {version('xllamacpp')}, gguf {version('gguf')}, 1 thread")
write("model.gguf")
flash, kinds = xllamacpp.llama_flash_attn_type, xllamacpp.ggml_type
ways = {"default": None, "on": flash.LLAMA_FLASH_ATTN_TYPE_ENABLED, "off": flash.LLAMA_FLASH_ATTN_TYPE_DISABLED}
found = {name: [scores(way, kind) for kind in (kinds.GGML_TYPE_F16, kinds.GGML_TYPE_F32)] for name, way in ways.items()}
for name, (f16, f32) in found.items():
    far = max(abs(a - b) for a, b in zip(f16, f32, strict=True))
    print(f"flash attention {name:7}  F16 against F32: {far:.6f} nats at most; first token {f16[0]:.7f} and {f32[0]:.7f}")
assert found["default"] == found["on"] and found["on"][0] == found["on"][1], "the behaviour has changed"
assert found["off"][0] != found["off"][1], "the behaviour has changed"
END
