"""Trains the SentencePiece tokenizer of a corpus. Text in, a .model file out; knows no arrays."""

from __future__ import annotations

import io
import random
from pathlib import Path

import sentencepiece

from ksana_jax.core.config import ConfigError

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2


def train_tokenizer(texts: list[str], vocab_size: int, sample_bytes: int, seed: int) -> bytes:
    """Trains a lossless byte-pair encoding; returns a serialized SentencePiece model.

    Source code must survive a round trip: nothing is normalised, no space is added or removed, newline is its own
    piece, indentation may be one piece, and bytes encode rare characters.

    Args:
      texts: one string per file.
      sample_bytes: approximate bytes to train on, as whole files in random order.

    Raises:
      ConfigError: the texts do not give vocab_size pieces.
    """
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    sample, size = [], 0
    for index in order:
        if size >= sample_bytes:
            break
        sample.append(texts[index])
        size += len(texts[index].encode())
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=(line for text in sample for line in text.split("\n") if line),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n"],
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            pad_id=-1,
            num_threads=2,
            minloglevel=2,
            max_sentence_length=16384,
        )
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2] or "they have no text"
        raise ConfigError(
            f"{size:,} bytes of training files give no tokenizer with vocab_size {vocab_size}: {reason}"
        ) from error
    return model.getvalue()


def load_tokenizer(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Loads the tokenizer of a .model file."""
    return sentencepiece.SentencePieceProcessor(model_file=str(path))  # pyright: ignore[reportCallIssue]
