#!/usr/bin/env bash
# llama.cpp ends a text at a token </s> although the GGUF file names another token as the end and </s> is not special.
#
# Guess: a text ends at the ids that the file names: tokenizer.ggml.eos_token_id, and those of turn and message.
# Seen: llama.cpp looks through the vocabulary for about twenty texts and ends at each of them, whatever the file
# says. </s> is among them, and also HTML's end tag of struck-through text. A model that writes this tag as one token
# typed "user defined" stops there; the same model with </i> in its place goes on to the length asked for.
# Hurt: models of markup and code whose vocabulary has </s> as a piece: answers end in the middle of a page.
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

WIDTH, END = 32, 2


def write(path, tag):
    """Writes a model of one layer that answers anything by the last token of its vocabulary."""
    tokens = ["<unk>", "<s>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", tag]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, kind.NORMAL, kind.USER_DEFINED]
    file = gguf.GGUFWriter(path, "llama")
    file.add_context_length(256)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(WIDTH)
    file.add_block_count(1)
    file.add_head_count(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("llama")
    file.add_token_list(tokens)
    file.add_token_scores([0.0] * len(tokens))
    file.add_token_types(types)
    file.add_bos_token_id(1)
    file.add_eos_token_id(END)
    file.add_unk_token_id(0)
    head = np.zeros((len(tokens), WIDTH), np.float32)
    head[-1] = 1
    file.add_tensor("token_embd.weight", np.ones_like(head))
    file.add_tensor("output.weight", head)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        file.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        file.add_tensor(f"blk.0.{name}.weight", np.zeros((WIDTH, WIDTH), np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def answer(tag):
    write("model.gguf", tag)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = "model.gguf", 256, 1, False
    server = xllamacpp.Server(params)
    given = server.handle_completions({"prompt": "a", "max_tokens": 5, "temperature": 0})
    given = given if isinstance(given, dict) else json.loads(given)
    return given["choices"][0]["finish_reason"], given["usage"]["completion_tokens"]


print(f"xllamacpp {version('xllamacpp')}, gguf {version('gguf')}; the file names <end> as eos_token_id")
found = {tag: answer(tag) for tag in ("</s>", "</i>")}
for tag, (reason, count) in found.items():
    print(f"a user-defined token {tag}: {count} of 5 tokens, finish_reason {reason}")
assert found == {"</s>": ("stop", 1), "</i>": ("length", 5)}, "the behaviour has changed"
END
