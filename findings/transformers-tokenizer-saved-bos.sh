#!/usr/bin/env bash
# transformers 5.24.0: a GPT-NeoX or Code Llama tokenizer forgets whether texts begin with BOS when it is saved and loaded.
#
# Guess: save_pretrained and AutoTokenizer.from_pretrained give back the tokenizer, as they do for Llama, Gemma, Qwen2 and GPT-2.
# Seen: add_bos_token and add_eos_token are not written for these two classes. A GPTNeoXTokenizer made with add_bos_token=True loads
# without BOS, a CodeLlamaTokenizer made with False loads with it. tokenizer.json has the right rule, which loading replaces by
# the class's default; the library tokenizers, and engines that read the file, follow it. Nothing is logged.
# Hurt: whoever fine-tunes with BOS and evaluates from the saved folder: training and evaluation see other texts, and engines side
# with the training.
# Versions: Python 3.11, transformers 5.24.0, tokenizers 0.23.3. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'END'
import logging

import tokenizers
import transformers

print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")
heard = []
logging.getLogger("transformers").addFilter(lambda record: heard.append(record.getMessage()) or True)
words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "<pad>", "a", "b", "ab", "\u2581", "\u2581a", "\u0120"])}
names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
expected = {"LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", "CohereTokenizer"}
kept = set()
for name in sorted(expected | {"GPTNeoXTokenizer", "CodeLlamaTokenizer"}):
    same = []
    for begins in (False, True):
        made = getattr(transformers, name)(vocab=words, merges=[("a", "b")], add_bos_token=begins, **names)
        made.save_pretrained(f"{name}-{begins}")
        loaded = transformers.AutoTokenizer.from_pretrained(f"{name}-{begins}")
        file = tokenizers.Tokenizer.from_file(f"{name}-{begins}/tokenizer.json")
        ids = [words["<s>"] in found for found in (made("ab").input_ids, loaded("ab").input_ids, file.encode("ab").ids)]
        print(f"{name:18} add_bos_token={begins!s:5}  BOS: made {ids[0]!s:5}  loaded {ids[1]!s:5}  by tokenizer.json {ids[2]}")
        assert type(loaded) is type(made) and ids[0] == ids[2] == begins
        same.append(ids[1] == begins)
    kept |= {name} if all(same) else set()
print(f"logged: {heard}")
assert kept == expected and not heard, "the behaviour has changed"
END
