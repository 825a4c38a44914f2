"""Loads the tokenizer of a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ksana_jax.core.gguf_file import gguf_of, read_gguf
from ksana_jax.core.sources import model_path
from ksana_jax.core.sources.hub import OTHER_TEMPLATES, TOKENIZERS
from ksana_jax.tokenizers.added_tokens import added_tokens, all_added, older_added_tokens
from ksana_jax.tokenizers.base import SpecialTokens, Tokenizer
from ksana_jax.tokenizers.files import TokenizerError, read_bytes, read_optional_object, read_text

JSON, MODEL = TOKENIZERS
CONFIG = "tokenizer_config.json"


def find_tokenizer(model: str | os.PathLike[str]) -> Tokenizer | None:
    """Loads the tokenizer of a model, given by path or name; None if it has none. See `load_tokenizer`."""
    path = model_path(model, weights=False)
    if (gguf := gguf_of(path)) is not None:
        return _of_gguf(gguf)
    return load_tokenizer(path) if any((path / name).exists() for name in TOKENIZERS) else None


def load_tokenizer(model: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model, given by path or name; see `core.sources.model_path`.

    A GGUF file has its own, whatever is next to it.

    In a directory, tokenizer.json takes precedence: it is self-contained (added tokens, BOS), and transformers and
    serving engines read it, while a tokenizer.model next to it often lacks the tokens of the chat format. A broken
    tokenizer.json is an error, never a reason to use tokenizer.model instead.

    Raises:
      TokenizerError: there is no tokenizer, or a file cannot be used.
      LoadError: a GGUF file is damaged.
    """
    directory = model_path(model, weights=False)
    if (gguf := gguf_of(directory)) is not None:
        if (found := _of_gguf(gguf)) is None:
            raise TokenizerError(f"{gguf} has no tokenizer")
        return found
    # The older special_tokens_map.json names what tokenizer_config.json does not.
    sources = {path: read_optional_object(path) for path in (directory / CONFIG, directory / "special_tokens_map.json")}
    specials = SpecialTokens(_special_token("bos_token", sources), _special_token("eos_token", sources))
    config = sources[directory / CONFIG]
    added = added_tokens(config, directory / CONFIG)
    # As in transformers: a file with the field added_tokens_decoder is complete.
    naming = [config] if "added_tokens_decoder" in config else list(sources.values())
    # Each library takes a tenth of a second to import, and a directory needs only one of them.
    if (path := directory / JSON).exists():
        from ksana_jax.tokenizers.tokenizer_json import JsonTokenizer

        splits = config.get("split_special_tokens") is True
        tokenizer: Tokenizer = JsonTokenizer(str(path), read_text(path), specials, all_added(added, naming), splits)
    elif (path := directory / MODEL).exists():
        from ksana_jax.tokenizers.sentencepiece_model import SentencePieceTokenizer

        added = older_added_tokens(directory) | added
        tokenizer = SentencePieceTokenizer(str(path), read_bytes(path), config, specials, added)
    else:
        raise TokenizerError(f"{directory} has no tokenizer; supported: {JSON} or {MODEL} (SentencePiece)")
    tokenizer.named_tokens = {**tokenizer.named_tokens, **_named_tokens(naming)}
    tokenizer.eos_source = str(_naming("eos_token", sources) or tokenizer.source)
    _read_template(tokenizer, directory, config)
    return tokenizer


def _of_gguf(path: Path) -> Tokenizer | None:
    from ksana_jax.tokenizers.gguf_tokenizer import gguf_tokenizer

    metadata = read_gguf(path).metadata
    model = metadata.get("tokenizer.ggml.model", "none")
    if isinstance(model, str) and model in ("none", "no_vocab"):
        return None
    return gguf_tokenizer(metadata, str(path))


def _naming(name: str, sources: Mapping[Path, Mapping[str, Any]]) -> Path | None:
    return next((path for path, values in sources.items() if values.get(name) is not None), None)


def _special_token(name: str, sources: Mapping[Path, Mapping[str, Any]]) -> str | None:
    if (path := _naming(name, sources)) is None:
        return None
    token = sources[path][name]
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TokenizerError(f"{path}: {name} is {token!r:.60}, must be a string or an object with content")
    return text or None


def _named_tokens(sources: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns texts of special tokens by name, as transformers gives them to chat templates; the first source wins."""
    found: dict[str, str] = {}
    for values in sources:
        groups = [values.get(key) for key in ("model_specific_special_tokens", "extra_special_tokens")]
        named = {name: token for name, token in values.items() if name.endswith("_token")}
        for group in (named, *(group for group in groups if isinstance(group, dict))):
            texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in group.items()}
            found = {name: text for name, text in texts.items() if isinstance(text, str)} | found
    return found


def _read_template(tokenizer: Tokenizer, directory: Path, config: Mapping[str, Any]) -> None:
    """Reads chat templates from chat_template.jinja and the folder of further templates, or else tokenizer_config.json.

    An unusable template is an error only for chats.
    """
    try:
        tokenizer.set_templates(_named_templates(directory, config), str(directory / CONFIG))
    except TokenizerError as error:
        tokenizer.no_template = str(error)


def _named_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in sorted((directory / OTHER_TEMPLATES).glob("*.jinja"))}
    if (path := directory / "chat_template.jinja").exists():
        files["default"] = path
    if files:
        return {name: read_text(path) for name, path in files.items()}
    given = config.get("chat_template")
    if not isinstance(given, list):
        given = [] if given is None else [{"name": "default", "template": given}]
    named: dict[Any, Any] = {e.get("name"): e.get("template") for e in given if isinstance(e, dict)}
    for name, template in named.items():
        if not isinstance(name, str) or not isinstance(template, str):
            wrong = template if isinstance(name, str) else name
            raise TokenizerError(f"{directory / CONFIG}: chat_template is {type(wrong).__name__}, must be a string")
    return named
