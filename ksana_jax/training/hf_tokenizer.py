"""The files by which transformers reads our SentencePiece tokenizer: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from ksana_jax.training.tokenizer import BOS_ID, EOS_ID, UNK_ID

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space within pieces


def tokenizer_files(model: bytes) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json with the same pieces and ids as a SentencePiece BPE model.

    A text is given bos and no eos. Only the texts "<unk>", "<s>" and "</s>" come out differently: SentencePiece spells
    them, tokenizer.json takes them for the special tokens.

    Args:
      model: serialized, as `tokenizer.train_tokenizer` makes it (no normalisation, byte fallback, no dummy prefix).
    """
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)  # pyright: ignore[reportCallIssue]
    pieces = [processor.id_to_piece(index) for index in range(processor.vocab_size())]
    ids = {piece: index for index, piece in enumerate(pieces)}
    newline = ids["\n"]
    plain = {
        piece for piece, index in ids.items() if index > EOS_ID and index != newline and not processor.is_byte(index)
    }
    # SentencePiece joins the two neighbours whose joint piece came first in training, however the piece is split.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(plain, key=lambda piece: ids[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in plain and piece[cut:] in plain
    ]
    unk, bos, eos = pieces[UNK_ID], pieces[BOS_ID], pieces[EOS_ID]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, BOS_ID)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (unk, bos, eos)])
    tokenizer.add_tokens([AddedToken("\n", special=False, normalized=False)])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }
