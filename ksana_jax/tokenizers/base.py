"""The interface of all tokenizers, and how all of them decode. Knows no file formats.

A token stands for bytes, not characters: one code point may need several tokens. Text is returned as soon as its bytes
are complete and never revised, so the work per token is constant, regardless of the text's length.
"""

from __future__ import annotations

import abc
import codecs
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class Piece(NamedTuple):
    """The bytes that a token stands for.

    data: bytes in the middle of a text.
    special: omitted with skip_special_tokens.
    at_start: bytes at the start of a text; None if they equal data.
    opens: whether, after this piece at the start of a text, the next piece still counts as at the start.
    """

    data: bytes
    special: bool = False
    at_start: bytes | None = None
    opens: bool = False


NOTHING = Piece(b"", opens=True)
# Enough tokens to hold every byte of a code point that a prompt leaves incomplete.
_CONTEXT_TOKENS = 8


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Gives one U+FFFD per invalid byte, as SentencePiece does; Python's "replace" gives one per truncated sequence."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd" * (error.end - error.start), error.end


EACH_BYTE = "ksana_each_byte"
codecs.register_error(EACH_BYTE, _each_byte)


class SpecialTokens(NamedTuple):
    """Texts of the BOS and EOS tokens; None if a model has none."""

    bos: str | None = None
    eos: str | None = None


class Tokenizer(abc.ABC):
    """Converts text to ids and back.

    Attributes:
      source: the file it was read from, for messages.
      vocab_size: one more than the largest id.
      bos_id, eos_id: None if the model has none.
      more_eos_ids: further ids that end a text, such as the end of a turn.
      eos_source: the file that names eos_id.
      added_ids: of the tokens that are matched in a text before the rest is split.
      bos_token, eos_token: their texts, "" if there is none. named_tokens: of all that files name, by their names.
      chat_template: Jinja source; None if the model has none that can be used.
      chat_templates: all of them by name, where the model's files name them.
      no_template: why there is none, for messages; "" if the files name none.
      byte_errors: name of the codec error handler for bytes that are not UTF-8.
    """

    source: str
    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    more_eos_ids: tuple[int, ...] = ()
    eos_source: str = ""
    added_ids: tuple[int, ...] = ()
    bos_token: str = ""
    eos_token: str = ""
    named_tokens: Mapping[str, str] = MappingProxyType({})
    chat_template: str | None = None
    chat_templates: Mapping[str, str] = MappingProxyType({})
    no_template: str = ""
    byte_errors: str = "replace"
    strip_start: int = 0

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text according to the tokenizer's files; generation_config.json may name more."""
        first = () if self.eos_id is None else (self.eos_id,)
        return tuple(dict.fromkeys((*first, *self.more_eos_ids)))

    def set_templates(self, named: Mapping[str, str], source: str) -> None:
        """Takes the chat templates of a file, `source`; "default" is used unless another is asked for."""
        self.chat_templates, self.chat_template, self.no_template = named, named.get("default"), ""
        if named and self.chat_template is None:
            names = ", ".join(f"{name!r:.30}" for name in named)
            self.no_template = f"{source}: no chat template is named 'default'; chat_template= takes one of {names}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Converts a text to ids. Special tokens written out in the text, as in chat templates, become their ids.

        Args:
          add_special_tokens: add the special tokens that the model's files specify, usually BOS. Set it to False for
            texts from `render_chat`, which already contain them.

        Raises:
          ValueError: the text is not a string, or contains half of a surrogate pair.
          TokenizerError: the vocabulary cannot express the text.
        """
        if not isinstance(text, str):
            raise ValueError(f"text is {type(text).__name__}, must be a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text has half of a surrogate pair at character {error.start:,}") from None
        ids = self._encode(text, add_special_tokens)
        if add_special_tokens and ids[:2] == [self.bos_id] * 2:
            warnings.warn(f"{self.source} adds {self.bos_token!r} to a text that begins with it", stacklevel=2)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Converts ids to text. Ids outside the vocabulary give no text; bytes that are not UTF-8 become U+FFFD."""
        stream = IncrementalDetokenizer(self, skip_special_tokens)
        return stream.push(ids) + stream.flush()

    @abc.abstractmethod
    def piece(self, token_id: int) -> Piece:
        """Returns the text piece of a token; empty for ids outside the vocabulary."""

    @abc.abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


class IncrementalDetokenizer:
    """Converts ids to text as they arrive.

    The results of `push` and a final `flush` add up to `Tokenizer.decode` of all ids. No code point is split, and
    U+FFFD appears only if no later byte can complete a character.

    Args:
      skip_special_tokens: omit special tokens.
      context: preceding ids, such as the prompt's. They give no text, but the first word after them keeps its space,
        and a code point that they leave incomplete is completed.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, context: Sequence[int] = ()):
        self._piece = tokenizer.piece
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.byte_errors)
        self._at_start = True
        self._strip = tokenizer.strip_start
        if len(context):
            self.push(self._last_with_text(context))

    def _last_with_text(self, context: Sequence[int]) -> list[int]:
        found: list[int] = []
        for token_id in reversed(context):
            piece = self._piece(int(token_id))
            if piece.data and not (self._skip and piece.special):
                found.append(int(token_id))
                if len(found) == _CONTEXT_TOKENS:
                    break
        return found[::-1]

    def push(self, ids: Iterable[int]) -> str:
        """Adds the next ids; returns the text that they complete."""
        data = bytearray()
        for token_id in ids:
            piece = self._piece(int(token_id))
            if piece.special and self._skip:
                continue
            if self._at_start:
                data += piece.data if piece.at_start is None else piece.at_start
                self._at_start = piece.opens
            else:
                data += piece.data
        return self._stripped(self._utf8.decode(bytes(data)))

    def flush(self) -> str:
        """Returns the remaining text: incomplete bytes become U+FFFD. Later ids continue the same text."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text
