"""Ids to text as they come. Knows bytes and where a text begins, not how a vocabulary is stored.

A token stands for bytes, not for characters: a code point may need several tokens. Text is settled as soon as its bytes
are, so that the work per token is constant however long the text grows, and what was given out is never taken back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Piece(NamedTuple):
    """What a token stands for.

    data: bytes in the middle of a text.
    special: left out with skip_special_tokens.
    at_start: bytes where no text comes before; None for the same.
    opens: whether what follows is still at the start of the text, after this piece came at it.
    """

    data: bytes
    special: bool = False
    at_start: bytes | None = None
    opens: bool = False


NOTHING = Piece(b"", opens=True)
# Enough tokens to hold every byte of a code point that a prompt leaves open.
_CONTEXT_TOKENS = 8


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD for each wrong byte, as SentencePiece does; Python's "replace" gives one for a cut-off sequence."""
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
    """Turns ids into text as they come.

    All that `push` gave and `flush` at the end make what `Tokenizer.decode` gives for all ids. No code point is split,
    and U+FFFD appears only where no later byte can help.

    Args:
      skip_special_tokens: leave special tokens out.
      context: ids that come before, such as the prompt's; they give no text, but the first word after them keeps its
        space and a code point that they leave open is completed.
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
        """Takes the next ids; returns the text that they settle."""
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
        """The rest: bytes that wait for more become U+FFFD. What is pushed afterwards goes on in the same text."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text
