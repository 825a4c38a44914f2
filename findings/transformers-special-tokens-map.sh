#!/usr/bin/env bash
# transformers 5.23: special_tokens_map.json decides, or is ignored, depending on a key of another file.
#
# Guess: of two files that name different end-of-sequence tokens, one wins always.
# Seen: special_tokens_map.json wins if tokenizer_config.json has no `added_tokens_decoder`, and is ignored if it has
# one, whatever that holds. Nothing is logged either way.
# Hurt: whoever changes the end of a text in special_tokens_map.json, as older guides to fine-tuning advise. With a
# checkpoint that newer versions saved the edit has no effect, and answers do not end.
# Versions: Python 3.11, transformers 5.23.0, tokenizers 0.23.3. Exits with 1 if the behaviour is another one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'END'
import json
import logging
from pathlib import Path

import tokenizers
import transformers

print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}")
words = {"a": 0, "b": 1, "<one>": 2, "<two>": 3, "<unk>": 4}
model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
model.add_special_tokens(["<one>", "<two>", "<unk>"])
heard = []
logging.getLogger("transformers").addFilter(lambda record: heard.append(record.getMessage()) or True)


def eos_of(name, **more):
    here = Path(name)
    here.mkdir()
    model.save(str(here / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<one>", **more}
    (here / "tokenizer_config.json").write_text(json.dumps(config))
    (here / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<two>"}))
    return transformers.AutoTokenizer.from_pretrained(here).eos_token


added = {"2": {"content": "<one>", "special": True}, "3": {"content": "<two>", "special": True}}
found = {
    "without added_tokens_decoder": eos_of("without"),
    "with an empty one": eos_of("empty", added_tokens_decoder={}),
    "with one": eos_of("with", added_tokens_decoder=added),
}
print("tokenizer_config.json says <one>, special_tokens_map.json says <two>")
for name, eos in found.items():
    print(f"{name:30} eos_token is {eos}")
print("messages:", heard)
assert list(found.values()) == ["<two>", "<one>", "<one>"], "the behaviour has changed"
assert not heard, "a message is logged now"
END
