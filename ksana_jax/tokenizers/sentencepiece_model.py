"""SentencePiece tokenizers (`tokenizer.model`, arXiv:1808.06226), with the tokens that Hugging Face files add."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_pb2

from ksana_jax.tokenizers.added_tokens import AddedToken
from ksana_jax.tokenizers.base import EACH_BYTE, NOTHING, Piece, SpecialTokens, Tokenizer
from ksana_jax.tokenizers.files import TokenizerError, one_line

MARK = "\u2581"  # stands for a space in pieces


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with the settings of tokenizer_config.json.

    BOS comes first unless add_bos_token is false, EOS last if add_eos_token is true. Control pieces (BOS, EOS) and
    added tokens written out in a text become their ids. The space before a text's first word is added only at the
    very beginning, or after every such token if the file has "legacy": true.

    Args:
      source: the file it comes from, for messages.
      data: a serialized ModelProto.
      config: add_bos_token, add_eos_token and legacy, as in tokenizer_config.json.
      specials: texts of BOS and EOS; None takes the model's.
      added: tokens by id that are matched in a text before the model splits the rest.

    Raises:
      TokenizerError: the model cannot be used.
    """

    byte_errors = EACH_BYTE

    def __init__(
        self,
        source: str,
        data: bytes,
        config: Mapping[str, Any],
        specials: SpecialTokens,
        added: Mapping[int, AddedToken],
    ):
        self.source = source
        self._proto = model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            self._proto.ParseFromString(data)
            self._model = _processor(data)
        except Exception as error:  # sentencepiece and protobuf raise their own, and RuntimeError
            raise TokenizerError(f"{source} is not a SentencePiece model: {one_line(error)}") from None
        self._num_pieces: int = self._model.vocab_size()
        if not self._num_pieces:
            raise TokenizerError(f"{source} is not a SentencePiece model: it has no pieces")
        self._without_prefix: Any = None
        self._legacy = config.get("legacy") is True
        self._strip_one = self._proto.normalizer_spec.add_dummy_prefix
        self._strip_all = self._proto.normalizer_spec.remove_extra_whitespaces
        self._unk_text = self._proto.trainer_spec.unk_surface

        self._added = added
        controls = (i for i in range(self._num_pieces) if self._model.is_control(i))
        tokens = {self._model.id_to_piece(i): AddedToken(self._model.id_to_piece(i), i) for i in controls}
        tokens |= {token.content: token for token in self._added.values()}
        self._tokens = {content: token for content, token in tokens.items() if content}
        self._written_out = _any_of(self._tokens)
        self.added_ids = tuple(sorted(token.id for token in self._tokens.values()))
        self.vocab_size = max(self._num_pieces, 1 + max(self._added, default=-1))
        self._pieces: dict[int, Piece] = {}

        self.bos_id, self.bos_token = self._special("bos_token", specials.bos, self._model.bos_id())
        self.eos_id, self.eos_token = self._special("eos_token", specials.eos, self._model.eos_id())
        unk_id = self._model.unk_id()  # -1 for the vocabulary of a GGUF file that marks no token as unknown
        self.named_tokens = {"unk_token": self._model.id_to_piece(unk_id)} if unk_id >= 0 else {}
        self._add_bos = config.get("add_bos_token", True) is not False
        self._add_eos = config.get("add_eos_token", False) is True

    def _special(self, name: str, text: str | None, model_id: int) -> tuple[int | None, str]:
        if text is None:
            return (model_id, self._model.id_to_piece(model_id)) if model_id >= 0 else (None, "")
        if text in self._tokens:
            return self._tokens[text].id, text
        found = self._model.piece_to_id(text)
        if self._model.id_to_piece(found) != text:
            raise TokenizerError(f"{self.source}: {name} {text!r} is not in the vocabulary")
        return found, text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        if add_special_tokens and self._add_bos and self.bos_id is not None:
            ids.append(self.bos_id)
        for index, part in enumerate(self._split(text)):
            if isinstance(part, AddedToken):
                ids.append(part.id)
            elif part:
                model = self._model if index == 0 or self._legacy else self._later_model()
                ids += model.encode(part)
        if add_special_tokens and self._add_eos and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _split(self, text: str) -> Iterator[str | AddedToken]:
        """Yields the tokens written out in a text, and the text between them."""
        end, swallow = 0, False
        for match in self._written_out.finditer(text) if self._written_out else ():
            token = self._tokens[match[0]]
            between = text[end : match.start()]
            between = between.lstrip() if swallow else between
            yield between.rstrip() if token.lstrip else between
            yield token
            end, swallow = match.end(), token.rstrip
        yield text[end:].lstrip() if swallow else text[end:]

    def _later_model(self) -> Any:
        """The model for text after a special token, which gets no space before its first word."""
        if not self._strip_one:
            return self._model
        if self._without_prefix is None:
            proto = model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
            proto.CopyFrom(self._proto)
            proto.normalizer_spec.add_dummy_prefix = False
            self._without_prefix = _processor(proto.SerializeToString())
        return self._without_prefix

    def piece(self, token_id: int) -> Piece:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id) if 0 <= token_id < self.vocab_size else NOTHING
        return piece

    def _make_piece(self, token_id: int) -> Piece:
        if added := self._added.get(token_id):
            return Piece(added.content.encode(), special=added.special)
        if token_id >= self._num_pieces:
            return NOTHING
        text = self._model.id_to_piece(token_id)
        if self._model.is_control(token_id):
            return Piece(text.encode(), special=True)
        if self._model.is_unknown(token_id):
            return Piece(self._unk_text.encode())
        if self._model.is_byte(token_id):
            return Piece(bytes([int(text[3:5], 16)]))  # <0x0A>
        data = text.replace(MARK, " ").encode()
        if text.startswith(MARK) and (self._strip_one or self._strip_all):
            # A text's first word carries the space that encoding put before it. If encoding also drops extra spaces,
            # all leading spaces are removed.
            return Piece(data, at_start=data[1:], opens=self._strip_all and text == MARK)
        return Piece(data)


def _processor(data: bytes) -> Any:
    model = sentencepiece.SentencePieceProcessor()
    model.LoadFromSerializedProto(data)
    return model


def _any_of(contents: Iterable[str]) -> re.Pattern[str] | None:
    """Returns a pattern that matches any of the texts, the longest if several match."""
    rests: dict[str, list[str]] = {}
    for content in sorted(contents, key=len, reverse=True):
        rests.setdefault(content[0], []).append(re.escape(content[1:]))
    # By first characters: Gemma has thousands of tokens that begin with "<", which no other position should try.
    groups = (f"{re.escape(first)}(?:{'|'.join(rest)})" for first, rest in rests.items())
    return re.compile("|".join(groups)) if rests else None
