"""Tokenizers of the library `tokenizers` (`tokenizer.json`): byte-level BPE (GPT-2 and later), BPE like Llama's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers

from ksana_jax.tokenizers.added_tokens import AddedToken
from ksana_jax.tokenizers.base import EACH_BYTE, NOTHING, Piece, SpecialTokens, Tokenizer
from ksana_jax.tokenizers.files import TokenizerError, one_line

SUPPORTED_DECODERS = "ByteLevel, ByteFallback, Replace, Fuse, Strip (spaces at the start), Metaspace"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer(Tokenizer):
    """The tokenizer of a tokenizer.json, whose own post-processor adds BOS and EOS.

    Args:
      source: the file it comes from, for messages.
      text: a tokenizer.json.
      specials: texts of BOS and EOS.
      added: tokens that other files declare or name; see `added_tokens.all_added`. What the text lacks is added to it.
      splits: True splits special tokens that are written out in a text as any other text.

    Raises:
      TokenizerError: the text cannot be used, an added token would get another id than the declared one, or the
        decoder is not in SUPPORTED_DECODERS.
    """

    def __init__(
        self, source: str, text: str, specials: SpecialTokens, added: Iterable[AddedToken] = (), splits: bool = False
    ):
        self.source = source
        self._tokenizer = _call(f"{source} is not a tokenizer.json", tokenizers.Tokenizer.from_str, text)
        # Settings for training batches: they would truncate or pad prompts, and tokenize equal prompts differently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue]
        self._tokenizer.encode_special_tokens = splits
        self._add(added)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError(f"{source} has an empty vocabulary")
        self.vocab_size = 1 + max(vocabulary.values())
        # By id; True for special ones.
        self._added = {i: token.special for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        self.added_ids = tuple(sorted(self._added))
        # As parsed by the library, which may differ from another JSON parser.
        decoder = self._tokenizer.decoder
        self._decode_piece = _PieceDecoder(decoder and json.loads(decoder.__getstate__()), source)
        self.byte_errors, self.strip_start = self._decode_piece.byte_errors, self._decode_piece.strip_start
        self._pieces: dict[int, Piece] = {}
        self.bos_id, self.bos_token = self._special("bos_token", specials.bos)
        self.eos_id, self.eos_token = self._special("eos_token", specials.eos)

    def _add(self, added: Iterable[AddedToken]) -> None:
        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        new = [token for token in added if token.content not in known]
        new = [token for token in new if token.id >= 0 or self._tokenizer.token_to_id(token.content) is not None]
        fields = ({name: value for name, value in token._asdict().items() if name != "id"} for token in new)
        self._tokenizer.add_tokens([tokenizers.AddedToken(**values) for values in fields])
        for token in new:
            if token.id >= 0 and (found := self._tokenizer.token_to_id(token.content)) != token.id:
                raise TokenizerError(
                    f"{self.source}: {token.content!r:.60} gets id {found}, tokenizer_config.json gives it {token.id}"
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
            piece = NOTHING if text is None else self._decode_piece(text, self._added.get(token_id))
            self._pieces[token_id] = piece
        return piece


class _PieceDecoder:
    """The steps of a tokenizer.json's decoder that apply to single tokens, before tokens are joined.

    `IncrementalDetokenizer` handles dependence on neighbouring tokens: joining bytes into characters, and dropping
    spaces at the start of a text.
    """

    def __init__(self, decoder: dict[str, Any] | None, source: str):
        self._source = source
        self.byte_errors, self.strip_start = "replace", 0
        self._steps: list[Callable[[str | bytes], str | bytes]] = []
        self._metaspace: str | None = None
        self._fused = False
        if decoder is None:
            raise self._unsupported("none")
        self._add(decoder)

    def _unsupported(self, what: str) -> TokenizerError:
        return TokenizerError(f"{self._source}: decoder {what} is not supported; supported: {SUPPORTED_DECODERS}")

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
            # The first token loses all of its marks, unless the encoder adds none at the start of a text.
            never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
            self._metaspace = "" if never else mark
        else:
            raise self._unsupported(kind)

    def __call__(self, token: str, special: bool | None) -> Piece:
        """Returns a token's piece; special is None for tokens that are not added."""
        added = special is not None
        data = self._bytes(token, added)
        at_start = self._bytes(token.replace(self._metaspace, ""), added) if self._metaspace else None
        return Piece(data, bool(special), at_start)

    def _bytes(self, token: str, added: bool) -> bytes:
        value: str | bytes = token
        for step in self._steps:
            # Added tokens are plain text. The library takes one such as "né" for bytes, and shows U+FFFD. A single
            # character may be a byte's own token.
            if not (added and len(token) > 1 and step is _byte_level):
                value = step(value)
        return value if isinstance(value, bytes) else value.encode()


def _byte_fallback(token: str | bytes) -> str | bytes:
    found = _BYTE.fullmatch(token) if isinstance(token, str) else None
    return bytes([int(found[1], 16)]) if found else token


def _byte_level_alphabet() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary (GPT-2).

    Printable Latin-1 characters stand for themselves, characters from 256 for the other bytes.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str | bytes) -> str | bytes:
    # A token with a character outside the alphabet, such as a space, stands for itself, not for bytes.
    if isinstance(token, str) and all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token


def _call(what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls the library and converts its errors: it raises bare Exception, or for panics even a BaseException."""
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        reason = "a regular expression of it gives up on the text" if "retry-limit" in str(error) else one_line(error)
        raise TokenizerError(f"{what}: {reason}") from None
