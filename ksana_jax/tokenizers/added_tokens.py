"""Tokens that the files of a directory add to a vocabulary. Knows no tokenizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ksana_jax.tokenizers.files import TokenizerError, read_optional_object


class AddedToken(NamedTuple):
    """A token that is matched in a text before the rest is split.

    lstrip, rstrip: whether it also consumes the white space before it, after it.
    single_word, normalized: whether it is matched only as a whole word, and in the normalized text. Only the library
      `tokenizers` knows these.
    """

    content: str
    id: int
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def older_added_tokens(directory: Path) -> dict[int, AddedToken]:
    """Reads added tokens by id from added_tokens.json, {text: id}."""
    found: dict[int, AddedToken] = {}
    path = directory / "added_tokens.json"
    for content, token_id in read_optional_object(path).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**31 or not content:
            raise TokenizerError(f"{path}: {content!r:.60} has id {token_id!r:.60}, must be a token id")
        found[token_id] = AddedToken(content, token_id)
    return found


def added_tokens(config: Mapping[str, Any], path: Path) -> dict[int, AddedToken]:
    """Reads added tokens by id from the added_tokens_decoder of a tokenizer_config.json, whose path messages name."""
    found: dict[int, AddedToken] = {}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder must be an object of ids and tokens")
    for key, token in decoder.items():
        content = token.get("content") if isinstance(token, dict) else None
        if not (key.isascii() and key.isdigit() and len(key) <= 9) or not isinstance(content, str) or not content:
            raise TokenizerError(f"{path}: added_tokens_decoder[{key!r:.60}] must be an id and a token with content")
        special = token.get("special") is True
        normalized = token.get("normalized", not special) is True  # as in the library `tokenizers`
        found[int(key)] = AddedToken(content, int(key), special, **_flags(token), normalized=normalized)
    return found


def all_added(declared: Mapping[int, AddedToken], sources: Iterable[Mapping[str, Any]]) -> list[AddedToken]:
    """Returns declared tokens by id, then, with id -1, the special tokens that files only name, such as "pad_token".

    transformers matches the latter in texts too if the vocabulary has them.
    """
    found = {token.content: token for _, token in sorted(declared.items())}
    for values in sources:
        tokens = [token for name, token in values.items() if name.endswith("_token")]
        for key in ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"):
            group = values.get(key)
            tokens += group.values() if isinstance(group, dict) else group if isinstance(group, list) else ()
        for token in tokens:
            fields = token if isinstance(token, dict) else {"content": token}
            if isinstance(content := fields.get("content"), str) and content:
                named = AddedToken(content, -1, **_flags(fields), normalized=fields.get("normalized") is True)
                found.setdefault(content, named)
    return list(found.values())


def _flags(token: Mapping[str, Any]) -> dict[str, bool]:
    return {name: token.get(name) is True for name in ("lstrip", "rstrip", "single_word")}
