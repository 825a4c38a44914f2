"""A tokenizer for models without one, so that each of their tokens is text."""

from __future__ import annotations

from ksana_jax.tokenizers import Tokenizer
from ksana_jax.tokenizers.detokenizer import NOTHING, Piece


class Words(Tokenizer):
    """Reads id 17 as the word " 17", for each id of a vocabulary."""

    source = "numbers"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._pieces = [Piece(f" {token_id}".encode()) for token_id in range(vocab_size)]

    def piece(self, token_id: int) -> Piece:
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else NOTHING

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]
