"""Tokenizers of the library `tokenizers`, `tokenizer.json`: byte-level BPE (GPT-2 and later), BPE like Llama's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from ksana_jax.tokenizers.base import SpecialTokens, Tokenizer
from ksana_jax.tokenizers.detokenizer import EACH_BYTE, NOTHING, Piece
from ksana_jax.tokenizers.files import TokenizerError, one_line, read_text
from ksana_jax.tokenizers.growth import MAX_GROWTH, growth

SUPPORTED_DECODERS = "ByteLevel, ByteFallback, Replace, Fuse, Strip (spaces at the start), Metaspace"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json. Which tokens begin and end a text is for its own post-processor to say.

    Raises:
      TokenizerError: a file that cannot be used, a decoder that is not among SUPPORTED_DECODERS, or steps that make
        more than `growth.MAX_GROWTH` characters of one.
    """

    def __init__(self, path: Path, specials: SpecialTokens):
        self.source = str(path)
        text = read_text(path)
        self._tokenizer = _call(f"{path} is not a tokenizer.json", tokenizers.Tokenizer.from_str, text)
        # All belong to how the file's author made training batches: they would cut or fill prompts, and give the same
        # prompt other tokens each time.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue]
        self._check_growth(json.loads(text).get("decoder"))
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError(f"{path} has an empty vocabulary")
        self.vocab_size = 1 + max(vocabulary.values())
        self._special_ids = {i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        self._decode_piece = _PieceDecoder(json.loads(text).get("decoder"), path)
        self.byte_errors, self.strip_start = self._decode_piece.byte_errors, self._decode_piece.strip_start
        self._pieces: dict[int, Piece] = {}
        self.bos_id, self.bos_token = self._special("bos_token", specials.bos)
        self.eos_id, self.eos_token = self._special("eos_token", specials.eos)

    def _check_growth(self, decoder: dict[str, Any] | None) -> None:
        # As the library understood them, not as another reader of JSON does.
        parts = (self._tokenizer.normalizer, self._tokenizer.pre_tokenizer)
        normalizer, pre_tokenizer = (part and json.loads(part.__getstate__()) for part in parts)
        encoding = growth(pre_tokenizer, growth(normalizer))
        for what, most in (("encoding", encoding), ("decoding", growth(decoder))):
            if most > MAX_GROWTH:
                raise TokenizerError(
                    f"{self.source}: {what} can make {most:,.0f} characters of one; supported: at most {MAX_GROWTH}"
                )

    def _special(self, name: str, text: str | None) -> tuple[int | None, str]:
        if text is None:
            return None, ""
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise TokenizerError(f"{self.source}: {name} {text!r} is not in the vocabulary")
        return found, text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        encode = self._tokenizer.encode
        return _call(f"{self.source} cannot encode", encode, text, add_special_tokens=add_special_tokens).ids

    def piece(self, token_id: int) -> Piece:
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            piece = NOTHING if text is None else self._decode_piece(text, token_id in self._special_ids)
            self._pieces[token_id] = piece
        return piece


class _PieceDecoder:
    """A tokenizer.json's decoder, applied to one token: the steps before the tokens are joined, one after the other.

    What depends on neighbours is left to `IncrementalDetokenizer`: joining bytes to characters, and spaces that are
    dropped where a text begins.
    """

    def __init__(self, decoder: dict[str, Any] | None, path: Path):
        self._path = path
        self.byte_errors, self.strip_start = "replace", 0
        self._steps: list[Callable[[str | bytes], str | bytes]] = []
        self._metaspace: str | None = None
        self._fused = False
        if decoder is None:
            raise self._unsupported("none")
        self._add(decoder)

    def _unsupported(self, what: str) -> TokenizerError:
        return TokenizerError(f"{self._path}: decoder {what} is not supported; supported: {SUPPORTED_DECODERS}")

    def _add(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "Sequence":
            for part in step["decoders"]:
                self._add(part)
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Strip" and self._fused and step["content"] == " " and not step["stop"]:
            self.strip_start = step["start"]
        elif self._fused or self._metaspace:
            raise self._unsupported(f"{kind} after the tokens are joined")
        elif kind == "ByteLevel":
            self._fused = True
            self._steps.append(_byte_level)
        elif kind == "ByteFallback":
            self.byte_errors = EACH_BYTE
            self._steps.append(_byte_fallback)
        elif kind == "Replace" and "String" in step["pattern"]:
            old, new = step["pattern"]["String"], step["content"]
            self._steps.append(lambda token: token.replace(old, new) if isinstance(token, str) else token)
        elif kind == "Metaspace":
            mark = step["replacement"]
            self._steps.append(lambda token: token.replace(mark, " ") if isinstance(token, str) else token)
            # The first token loses all of its marks, unless the encoder puts none before a text.
            never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
            self._metaspace = "" if never else mark
        else:
            raise self._unsupported(kind)

    def __call__(self, token: str, special: bool) -> Piece:
        data = self._bytes(token)
        at_start = self._bytes(token.replace(self._metaspace, "")) if self._metaspace else None
        return Piece(data, special, at_start)

    def _bytes(self, token: str) -> bytes:
        value: str | bytes = token
        for step in self._steps:
            value = step(value)
        return value if isinstance(value, bytes) else value.encode()


def _byte_fallback(token: str | bytes) -> str | bytes:
    found = _BYTE.fullmatch(token) if isinstance(token, str) else None
    return bytes([int(found[1], 16)]) if found else token


def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character of a byte-level vocabulary (GPT-2): printable Latin-1 is itself, 256, ... are the rest."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str | bytes) -> str | bytes:
    # Added tokens are plain text: one with a character outside the alphabet, such as a space, stands for itself.
    if isinstance(token, str) and all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token


def _call(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls into the library, whose failures are bare Exceptions, and at worst panics outside of Exception."""
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{what}: {one_line(error)}") from None
