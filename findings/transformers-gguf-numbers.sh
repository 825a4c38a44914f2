#!/usr/bin/env bash
# transformers 5.24.0 and 5.2.0 split a GGUF file's texts into other tokens than llama.cpp: numbers, and the token that begins a text.
#
# Guess: AutoTokenizer.from_pretrained(..., gguf_file=...) gives the ids of llama.cpp: the file has all that it takes.
# Seen: 5.24.0 has no rule for tokenizer.ggml.pre "smollm": "1234" is one token, where llama.cpp and the model's own
# tokenizer take each digit for itself. With pre "llama-bpe" and no key add_bos_token, as files of the first Llama 3 are,
# llama.cpp begins a text with BOS and 5.24.0 does not. 5.2.0 reads neither `pre` nor add_bos_token: it begins every text with
# BOS, also where the file says false. Nothing is logged.
# Hurt: whoever evaluates a GGUF file in transformers, or kvpress 0.5.5, which needs a version below 5.3: text without
# numbers agrees, and every number is written as the model has never seen it.
# Versions: Python 3.11, transformers 5.24.0 and 5.2.0, PyTorch 2.13.0, gguf 0.19.0, xllamacpp 2026.10.11549. Exits with 1 if
# the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6 protobuf==7.36.2
cd "$folder"
cat > write.py <<'END'
import gguf
import numpy as np

WIDTH = 32
# The letters that stand for bytes in byte-level BPE, then what merges make.
plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
letters = [*map(chr, plain), *(chr(256 + i) for i in range(256 - len(plain)))]
tokens = ["<unk>", "<begin>", "<end>", *sorted(letters), "12", "123", "1234"]
for pre, begin in (("smollm", None), ("smollm", False), ("qwen2", None), ("llama-bpe", None)):
    file = gguf.GGUFWriter(f"{pre}-{begin}.gguf", "llama")
    file.add_context_length(256)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(WIDTH)
    file.add_block_count(1)
    file.add_head_count(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(pre)
    file.add_token_list(tokens)
    file.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    file.add_token_merges(["1 2", "12 3", "123 4"])
    file.add_unk_token_id(0)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    if begin is not None:
        file.add_add_bos_token(begin)
    file.add_tensor("token_embd.weight", np.ones((len(tokens), WIDTH), np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        file.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        file.add_tensor(f"blk.0.{name}.weight", np.zeros((WIDTH, WIDTH), np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
END
cat > count.py <<'END'
import glob
import json
import sys
from importlib.metadata import version


def by_transformers(path, text):
    import transformers

    return len(transformers.AutoTokenizer.from_pretrained(".", gguf_file=path)(text).input_ids)


def by_llama_cpp(path, text):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = path, 256, 1, False
    given = xllamacpp.Server(params).handle_completions({"prompt": text, "max_tokens": 1})
    return (given if isinstance(given, dict) else json.loads(given))["usage"]["prompt_tokens"]


name = sys.argv[1]
count = by_transformers if name == "transformers" else by_llama_cpp
expected = dict(pair.split("=") for pair in sys.argv[2:])
found = {path.removesuffix(".gguf"): f"{count(path, 'ab')},{count(path, '1234')}" for path in sorted(glob.glob("*.gguf"))}
for case, counts in found.items():
    print(f"{name} {version(name)}: pre-add_bos_token {case:14}  tokens of 'ab' and of '1234': {counts}")
assert found == expected, f"the behaviour has changed: {expected}"
END
venv/bin/python write.py
run() { HF_HUB_OFFLINE=1 venv/bin/python count.py "$@" 2>log || { tail -20 log >&2; exit 1; }; }
run xllamacpp smollm-None=2,4 smollm-False=2,4 qwen2-None=2,4 llama-bpe-None=3,3
venv/bin/pip install -q transformers==5.24.0
run transformers smollm-None=2,1 smollm-False=2,1 qwen2-None=2,4 llama-bpe-None=2,2
venv/bin/pip install -q transformers==5.2.0
run transformers smollm-None=3,2 smollm-False=3,2 qwen2-None=3,2 llama-bpe-None=3,2
