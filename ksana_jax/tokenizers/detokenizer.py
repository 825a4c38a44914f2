"""Converts ids to text incrementally. Knows bytes and where a text begins, not how a vocabulary is stored.

A token stands for bytes, not characters: one code point may need several tokens. Text is returned as soon as its bytes
are complete and never revised, so the work per token is constant, regardless of the text's length.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


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


class _Pieces(Protocol):
    byte_errors: str
    strip_start: int

    def piece(self, token_id: int, /) -> Piece: ...


class IncrementalDetokenizer:
    """Converts ids to text as they arrive.

    The results of `push` and a final `flush` add up to `Tokenizer.decode` of all ids. No code point is split, and
    U+FFFD appears only if no later byte can complete a character.

    Args:
      skip_special_tokens: omit special tokens.
      context: preceding ids, such as the prompt's. They give no text, but the first word after them keeps its space,
        and a code point that they leave incomplete is completed.
    """

    def __init__(self, tokenizer: _Pieces, skip_special_tokens: bool = True, context: Sequence[int] = ()):
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
