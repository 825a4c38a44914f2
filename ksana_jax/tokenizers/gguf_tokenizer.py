"""The tokenizer of a GGUF file, from the file's metadata. Knows keys and values, not how the file stores them.

Text becomes the ids that llama.cpp gives it with parse_special, with one exception: where two special or user-defined
tokens overlap in a text, the first counts here, the longer one there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ksana_jax.tokenizers.base import SpecialTokens, Tokenizer
from ksana_jax.tokenizers.files import TokenizerError
from ksana_jax.tokenizers.gguf_endings import INFILL, INFILL_ENDS, TURN_ENDS, no_ends
from ksana_jax.tokenizers.gguf_splits import SPLITS

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_SPECIAL = (UNKNOWN, CONTROL)
# Keys of tokens that only chat templates use, by their names there; the spelling is llama.cpp's.
NAMED_IDS = {
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
# Converters write this for a token that a model lacks: -1, or its 32 bits.
_NO_ID = (-1, 2**32 - 1)


class SpecialIds(NamedTuple):
    """Ids of special tokens in a GGUF file.

    bos: None if it names none.
    eos: ids that end a text, as in llama.cpp: those that the file names, EOS first, and those that have such a text.
    """

    bos: int | None
    eos: tuple[int, ...]


def special_ids(metadata: Mapping[str, Any], source: str) -> SpecialIds:
    """Reads the ids of BOS and of all tokens that end a text.

    Args:
      metadata: of a GGUF file, by key.
      source: the file's name, for messages.

    Raises:
      TokenizerError: an id is not one of the vocabulary.
    """
    return _Fields(metadata, source).special_ids()


def gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Makes the tokenizer that a GGUF file describes, with its chat template.

    Args:
      metadata: of the file, by key: numbers, strings, lists of strings, NumPy arrays of numbers.
      source: the file's name, for messages.

    Raises:
      TokenizerError: the metadata is damaged or describes a tokenizer that is not supported.
    """
    fields = _Fields(metadata, source)
    model = fields.get("model")
    if not isinstance(model, str) or model not in _MODELS:
        raise TokenizerError(f"{source}: tokenizer.ggml.model is {model!r:.60}; supported: {', '.join(_MODELS)}")
    tokenizer = _MODELS[model](fields)
    tokenizer.more_eos_ids = ends = fields.special_ids().eos
    if tokenizer.eos_id not in ends:
        tokenizer.eos_id = None  # named, but does not end a text
    tokenizer.named_tokens = {**tokenizer.named_tokens, **fields.named_tokens()}
    try:
        tokenizer.set_templates(fields.chat_templates(), source)
    except TokenizerError as error:  # only chats need one
        tokenizer.no_template = str(error)
    return tokenizer


class _Fields:
    """Metadata of a tokenizer."""

    def __init__(self, metadata: Mapping[str, Any], source: str):
        self._metadata, self.source = metadata, source
        self.ids = self._ids()
        self.tokens = list(self.ids)

    def error(self, name: str, problem: str) -> TokenizerError:
        return TokenizerError(f"{self.source}: tokenizer.ggml.{name} {problem}")

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def chat_templates(self) -> dict[str, str]:
        """Reads tokenizer.chat_template, the default, and the templates that have names after it."""
        prefix = "tokenizer.chat_template"
        keys = [key for key in self._metadata if key == prefix or key.startswith(f"{prefix}.")]
        return {key[len(prefix) + 1 :] or "default": self._metadata[key] for key in keys}

    def strings(self, name: str) -> list[str]:
        values = self.get(name)
        if not isinstance(values, list) or not values:
            raise self.error(name, "is missing" if values is None else "must be a list of strings, at least one")
        return values

    def _ids(self) -> dict[str, int]:
        ids: dict[str, int] = {}
        for index, token in enumerate(self.strings("tokens")):
            token = token or f"[EMPTY_{index}]"  # llama.cpp names empty tokens so too
            if (first := ids.setdefault(token, index)) != index:
                raise self.error("tokens", f"has {token!r:.60} twice, at {first:,} and {index:,}")
        return ids

    def numbers(self, name: str) -> np.ndarray | None:
        """Reads an array with a number for each token."""
        value = self.get(name)
        if value is not None and np.shape(value) != (len(self.tokens),):
            raise self.error(name, f"has {np.size(value):,} values, the vocabulary has {len(self.tokens):,} tokens")
        return value

    def id(self, name: str, default: int | None = None) -> int | None:
        value = self.get(name, default)
        if value is None or (type(value) is int and value in _NO_ID):
            return None
        if name == "bos_token_id" and type(value) is int and value >= len(self.tokens):
            return None  # only a tokenizer would add it, and then reports it
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.error(name, f"is {value!r:.60}, must be an id below {len(self.tokens):,}")
        return value

    def types(self) -> np.ndarray:
        """Reads the type of each token; one that llama.cpp knows by its text is a control token whatever its type."""
        given = self.numbers("token_type")
        types = np.full(len(self.tokens), NORMAL) if given is None else given.copy()
        known = [self._infill(key) for key in INFILL if self.id(key) is None]
        known += [self.ids.get(text) for text in TURN_ENDS]
        types[[i for i in known if i is not None and types[i] != UNKNOWN]] = CONTROL
        return types

    def _infill(self, key: str) -> int | None:
        named = self.id(key)
        return next((self.ids[t] for t in INFILL[key] if t in self.ids), None) if named is None else named

    def _bos_and_eos(self) -> tuple[int | None, int | None]:
        # SentencePiece's own ids, which the first files left out.
        bos, eos = (1, 2) if self.get("model") == "llama" and len(self.tokens) > 2 else (None, None)
        return self.id("bos_token_id", bos), self.id("eos_token_id", eos)

    def special_ids(self) -> SpecialIds:
        bos, eos = self._bos_and_eos()
        ends = [eos, self.id("eot_token_id"), self.id("eom_token_id"), *(self.ids.get(text) for text in TURN_ENDS)]
        ends += map(self._infill, INFILL_ENDS)
        without = {self.ids.get(text) for text in no_ends(self.ids)}
        return SpecialIds(bos, tuple(dict.fromkeys(i for i in ends if i is not None and i not in without)))

    def special_tokens(self) -> SpecialTokens:
        return SpecialTokens(*(None if index is None else self.tokens[index] for index in self._bos_and_eos()))

    def named_tokens(self) -> dict[str, str]:
        ids = {name: self.get(key) for name, key in NAMED_IDS.items()}
        return {n: self.tokens[i] for n, i in ids.items() if type(i) is int and 0 <= i < len(self.tokens)}

    def added(self, add_bos: bool) -> tuple[str | None, str | None]:
        """Texts of the tokens that begin and end every text; None for no such token."""
        texts = []
        for name, text, default in zip(("bos", "eos"), self.special_tokens(), (add_bos, False)):
            wanted = self.get(f"add_{name}_token", default)
            if wanted and text is None:
                raise self.error(f"add_{name}_token", f"is true, but {name}_token_id names no token")
            texts.append(text if wanted else None)
        return texts[0], texts[1]


def _byte_level(fields: _Fields) -> Tokenizer:
    from ksana_jax.tokenizers.tokenizer_json import JsonTokenizer

    pre = fields.get("pre")
    if pre is None or pre not in SPLITS:
        # llama.cpp takes "default" if there is none, with a warning; it is right for no model.
        problem = "is missing: convert the model again" if pre is None else f"is {pre!r:.60}"
        raise fields.error("pre", f"{problem}; supported: {', '.join(SPLITS)}")
    split = SPLITS[pre]
    types, ids = fields.types(), fields.ids
    added = np.flatnonzero(np.isin(types, (*_SPECIAL, USER_DEFINED))).tolist()
    bos, eos = fields.added(split.add_bos)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = (
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in split.patterns
    )
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": fields.tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": int(types[index]) in _SPECIAL,
            }
            for index in added
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _template(bos, eos, ids),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": split.ignore_merges,
            "vocab": ids,
            "merges": _merges(fields, ids),
        },
    }
    return JsonTokenizer(fields.source, json.dumps(content, ensure_ascii=False), fields.special_tokens())


def _merges(fields: _Fields, ids: Mapping[str, int]) -> Sequence[tuple[str, str]]:
    pairs: dict[tuple[str, str], None] = {}
    for index, merge in enumerate(fields.strings("merges")):
        left, space, right = merge.partition(" ")
        if not space or not (left in ids and right in ids and left + right in ids):
            raise fields.error("merges", f"has {merge!r:.60} at index {index:,}, must be two tokens that make a third")
        pairs[left, right] = None
    return list(pairs)


def _template(bos: str | None, eos: str | None, ids: Mapping[str, int]) -> dict[str, Any] | None:
    """Returns the post-processor that puts BOS before a text and EOS after it."""
    tokens = [token for token in (bos, eos) if token is not None]
    if not tokens:
        return None
    parts: list[dict[str, Any]] = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
    parts.insert(bos is not None, {"Sequence": {"id": "A", "type_id": 0}})
    named = {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in tokens}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": named}


def _sentencepiece(fields: _Fields) -> Tokenizer:
    from sentencepiece import sentencepiece_model_pb2 as model_pb2

    from ksana_jax.tokenizers.added_tokens import AddedToken
    from ksana_jax.tokenizers.sentencepiece_model import MARK, SentencePieceTokenizer

    scores, types = fields.numbers("scores"), fields.types()
    for name, values in (("scores", scores), ("token_type", fields.numbers("token_type"))):
        if values is None:
            raise fields.error(name, "is missing")
    assert scores is not None
    proto = model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = bool((types == BYTE).any())
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = fields.get("add_space_prefix", True)
    proto.normalizer_spec.remove_extra_whitespaces = False
    added: dict[int, AddedToken] = {}
    for index, (token, score, kind) in enumerate(zip(fields.tokens, scores.tolist(), types.tolist())):
        # A space in a text becomes MARK before merging, so a token with MARK is not found in texts.
        if kind == UNKNOWN or (kind == USER_DEFINED and MARK not in token):
            added[index] = AddedToken(token, index, special=kind == UNKNOWN)
        # SentencePiece's numbers. Merging treats user-defined and unused tokens as normal ones.
        merged = kind not in (UNKNOWN, CONTROL, BYTE)
        proto.pieces.add(piece=token, score=score, type=NORMAL if merged else kind)
    bos, eos = fields.added(add_bos=True)
    # legacy: after special tokens, too, a word gets a space.
    config = {"add_bos_token": bos is not None, "add_eos_token": eos is not None, "legacy": True}
    return SentencePieceTokenizer(fields.source, proto.SerializeToString(), config, fields.special_tokens(), added)


_MODELS: dict[str, Callable[[_Fields], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
