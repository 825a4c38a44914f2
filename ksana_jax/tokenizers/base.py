"""What every tokenizer offers. Knows no file formats."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import NamedTuple

from ksana_jax.tokenizers.detokenizer import IncrementalDetokenizer, Piece
from ksana_jax.tokenizers.files import TokenizerError

__all__ = ["Tokenizer", "TokenizerError", "SpecialTokens"]


class SpecialTokens(NamedTuple):
    """Texts of the tokens that begin and end a text; None where a model has none."""

    bos: str | None = None
    eos: str | None = None


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Attributes:
      source: the file it was read from, for messages.
      vocab_size: one more than the largest id.
      bos_id, eos_id: None where the model has none.
      bos_token, eos_token: their texts, "" where there is none; chat templates use them.
      chat_template: Jinja source, None where the model has none.
      byte_errors: name of the codec error handler for bytes that are not UTF-8.
    """

    source: str
    vocab_size: int
    bos_id: int | None = None
    eos_id: int | None = None
    bos_token: str = ""
    eos_token: str = ""
    chat_template: str | None = None
    byte_errors: str = "replace"
    strip_start: int = 0

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text by the tokenizer's own files; a model's generation_config.json may name more."""
        return () if self.eos_id is None else (self.eos_id,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written out in it, as chat templates do, become their ids.

        Args:
          add_special_tokens: begin (and end) the text as the model's files ask for: usually with BOS. False for
            `render_chat`'s texts, which say it themselves.

        Raises:
          ValueError: the text is not a string, or holds half of a surrogate pair.
          TokenizerError: the vocabulary cannot express the text.
        """
        if not isinstance(text, str):
            raise ValueError(f"text is {type(text).__name__}, must be a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text has half of a surrogate pair at character {error.start:,}") from None
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids outside the vocabulary give none. Bytes that are not UTF-8 become U+FFFD."""
        stream = IncrementalDetokenizer(self, skip_special_tokens)
        return stream.push(ids) + stream.flush()

    @abc.abstractmethod
    def piece(self, token_id: int) -> Piece:
        """What a token stands for in the middle of a text; ids outside the vocabulary stand for nothing."""

    @abc.abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
