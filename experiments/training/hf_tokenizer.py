"""Converts a SentencePiece tokenizer to transformers' files: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from experiments.training.tokenizer import BOS_ID, EOS_ID, UNK_ID

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space within pieces


def tokenizer_files(model: bytes, bos: bool) -> dict[str, bytes]:
    """Returns a tokenizer.json and tokenizer_config.json with the pieces and ids of a SentencePiece BPE model.

    Encoding adds no EOS. Only the texts "<unk>", "<s>" and "</s>" are encoded differently: SentencePiece spells
    them out, tokenizer.json treats them as special tokens.

    Args:
      model: serialized output of `tokenizer.train_tokenizer` (no normalisation, byte fallback, no dummy prefix).
      bos: whether encoding adds BOS. Otherwise the tokenizer names no BOS token, as the model has never seen it.
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)  # pyright: ignore[reportCallIssue]
    pieces = [processor.id_to_piece(index) for index in range(processor.vocab_size())]
    ids = {piece: index for index, piece in enumerate(pieces)}
    newline = ids["\n"]
    plain = {
        piece for piece, index in ids.items() if index > EOS_ID and index != newline and not processor.is_byte(index)
    }
    # SentencePiece merges the neighbours whose merged piece came first in training, regardless of how it was split.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(plain, key=lambda piece: ids[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in plain and piece[cut:] in plain
    ]
    unk, begin, eos = pieces[UNK_ID], pieces[BOS_ID], pieces[EOS_ID]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, BOS_ID)]
        )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (unk, begin, eos)])
    tokenizer.add_tokens([AddedToken("\n", special=False, normalized=False)])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin if bos else None,
        "eos_token": eos,
        "unk_token": unk,
        "add_bos_token": bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
