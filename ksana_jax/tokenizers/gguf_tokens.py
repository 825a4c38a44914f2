"""The tokenizer of a Hugging Face directory as metadata of a GGUF file: the inverse of `gguf_tokenizer`.

GGUF describes fewer tokenizers than those files do. The metadata is therefore read again, and must give the same ids
for texts of many kinds of characters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ksana_jax.tokenizers.base import Tokenizer
from ksana_jax.tokenizers.files import TokenizerError, read_bytes, read_text
from ksana_jax.tokenizers.gguf_endings import TURN_ENDS
from ksana_jax.tokenizers.gguf_splits import SPLITS
from ksana_jax.tokenizers.gguf_tokenizer import (
    CONTROL,
    NAMED_IDS,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    gguf_tokenizer,
    special_ids,
)
from ksana_jax.tokenizers.load import JSON, MODEL, load_tokenizer

# Texts that no two of `SPLITS` split alike. Composed characters only: GGUF does not normalise.
PROBES = (
    "We'LL say it's 1234567 ½ or ²x, shan't WE?\n\n\n  def f(x):\n\treturn x**2  # naïve  \r\n HelloWorld's $3.14 <b>",
    "Привет, мир! Ελλάδα 中文字符、标点。 こんにちは 한국어 नमस्ते 🙂👍🏽 ... -- !!\n",
    "aBthe'S1234<b>*~{the'll",
    "  ½한> in\n\n",
    "123AB`?\u064e'll\r\n`",
    "jumps jumps\njumps,jumps",
    "ª|,ا\u0301-^.क_  `1 ",
    "'S<>ท:\n\n   the12 theé",
)


def gguf_tokens(directory: Path, vocab_size: int, bos_id: int | None, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Returns the metadata of a directory's tokenizer, with its chat templates.

    Args:
      vocab_size: rows of the embedding; tokens that the tokenizer lacks are unused.
      bos_id, eos_ids: the config's. The tokenizer's BOS and EOS come first. Of further ids that end a text, two have a
        key, and tokens with such a text need none.

    Raises:
      TokenizerError: there is no tokenizer, or GGUF cannot describe it or an id that ends a text.
    """
    tokenizer = load_tokenizer(directory)
    found = _of_model(directory / MODEL) if (directory / MODEL).exists() else _of_json(directory / JSON)
    tokens, types = found["tokens"], found["token_type"]
    added = {index: tokenizer.piece(index) for index in tokenizer.added_ids}
    for index in range(len(tokens), max(vocab_size, tokenizer.vocab_size)):
        tokens.append(added[index].data.decode() if index in added else f"[PAD{index}]")
        types.append(NORMAL if index in added else UNUSED)
    for index, piece in added.items():
        if types[index] == NORMAL:
            types[index] = CONTROL if piece.special else USER_DEFINED
    found["token_type"] = np.array(types, np.int32)
    if "scores" in found:
        found["scores"] = np.pad(np.array(found["scores"], np.float32), (0, len(tokens) - len(found["scores"])))
    ends = list(dict.fromkeys((*(i for i in tokenizer.eos_ids if i < vocab_size), *eos_ids)))
    bos = bos_id if tokenizer.bos_id is None else tokenizer.bos_id
    letter = tokenizer.encode("a")
    found |= {"add_bos_token": letter[:1] == [bos], "add_eos_token": letter[-1:] == ends[:1]}
    ids = dict(zip(("eos", "eot", "eom"), ends[:1] + sorted(ends[1:], key=lambda index: tokens[index] in TURN_ENDS)))
    ids |= {} if bos is None else {"bos": bos}
    found |= {f"{name}_token_id": index for name, index in ids.items()}
    named = {NAMED_IDS[name]: text for name, text in tokenizer.named_tokens.items() if name in NAMED_IDS}
    found |= {key: tokens.index(text) for key, text in named.items() if text in tokens}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    for name, template in tokenizer.chat_templates.items():
        metadata[f"tokenizer.chat_template{'' if name == 'default' else f'.{name}'}"] = template
    if lost := sorted({*ends} - {*special_ids(metadata, tokenizer.source).eos}):
        told = ", ".join(f"{index} {tokens[index]!r:.60}" for index in lost)
        raise TokenizerError(
            f"{directory}: a GGUF file cannot say that {told} ends a text besides {len(ends) - len(lost)} others; "
            "take it out of eos_token_id in config.json and generation_config.json to write the file without"
        )
    return _like(tokenizer, metadata)


def _of_model(path: Path) -> dict[str, Any]:
    from sentencepiece import sentencepiece_model_pb2 as model_pb2

    proto = model_pb2.ModelProto.FromString(read_bytes(path))  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "model": "llama",
        "tokens": [piece.piece for piece in proto.pieces],
        "scores": [piece.score for piece in proto.pieces],
        "token_type": [piece.type for piece in proto.pieces],
        "add_space_prefix": proto.normalizer_spec.add_dummy_prefix,
    }


def _of_json(path: Path) -> dict[str, Any]:
    model = json.loads(read_text(path))["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise TokenizerError(f"{path} is no byte-level BPE; others need {MODEL} (SentencePiece) next to it")
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    if [model["vocab"][token] for token in tokens] != list(range(len(tokens))):
        raise TokenizerError(f"{path}: the ids of {len(tokens):,} tokens are not 0 to {len(tokens) - 1:,}")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {"model": "gpt2", "tokens": tokens, "merges": merges, "token_type": [NORMAL] * len(tokens)}


def _like(tokenizer: Tokenizer, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns metadata that encodes as a tokenizer does; of byte-level BPE, with the first split that fits."""
    names = {split: name for name, split in reversed(SPLITS.items())}.values()
    for pre in names if metadata["tokenizer.ggml.model"] == "gpt2" else ("default",):
        tried = metadata | {"tokenizer.ggml.pre": pre}
        made = gguf_tokenizer(tried, tokenizer.source)
        if all(made.encode(probe) == tokenizer.encode(probe) for probe in PROBES):
            return tried
    raise TokenizerError(
        f"{tokenizer.source} cannot be described in a GGUF file: texts would get other ids; give a GGUF file of the "
        "model, in F16 or F32, as llama.cpp converts it"
    )
