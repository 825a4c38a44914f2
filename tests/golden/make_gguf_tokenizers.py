"""Makes tests/golden/gguf_tokenizers: what llama.cpp makes of odd strings, for every name in `tokenizer.ggml.pre`.

In an environment of its own:

  pip install xllamacpp==2026.10.11549 gguf==0.19.0 tokenizers==0.23.3 'sentencepiece[protobuf]==0.2.3'
  python tests/golden/make_gguf_tokenizers.py SmolLM2-135M-Instruct.Q4_1.gguf      (a minute)

- strings.json: the strings, most of them composed at random of `FRAGMENTS`.
- byte_level.json, sentencepiece.json: metadata of two small vocabularies, trained on documentation that Python carries
  and on the strings, across words, so that ids show where llama.cpp splits a text.
- ids.json: for each string the lists of ids that occur, and for each tokenizer which of them it gives. The tokenizers
  are the first vocabulary under each name, the second one's `SENTENCEPIECE`, and SmolLM2's own, whose vocabulary is not
  stored. llama.cpp recognises special tokens that are written out (parse_special) and adds none.
- add.json: whether a text begins with BOS and ends with EOS, where the file does not say.
- pieces.json: the bytes of each token, as Latin-1, by vocabulary.

The library is that of the package xllamacpp, a build of llama.cpp, by its C interface.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import gguf
import sentencepiece
import tokenizers
import xllamacpp.xllamacpp as library
from gguf_strings import SPECIAL, TYPES, strings
from sentencepiece import sentencepiece_model_pb2 as model_pb2

FOLDER = Path(__file__).parent / "gguf_tokenizers"
SPLITS = runpy.run_path(str(Path(__file__).parents[2] / "ksana_jax" / "tokenizers" / "gguf_splits.py"))["SPLITS"]
SENTENCEPIECE = {"llama": {}, "llama-without-prefix": {"add_space_prefix": False}}
NUM_TOKENS = 600
SPECIAL_TYPES = [TYPES[kind] for kind in SPECIAL.values()]
# The model that SentencePiece trains has an unknown token already.
SPECIAL_SCORED = [token for token, kind in SPECIAL.items() if kind != "unknown"]
VOCAB_ONLY = 72  # where the parameters of llama_model_load_from_file have this flag, in this build
# What only some patterns split; merges across make that visible.
OFTEN = ["aÉb", "'ſt", "\u3000\u3000,", "éA", "\u2003b", "\u3000…"]
# Pieces that merging makes, and their types: those types do not keep llama.cpp from it.
OTHER_TYPES = {"▁the": "user-defined", "in": "unused"}


class Parameters(ctypes.Structure):
    """llama_model_params: as large as it may be, so that it can be passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * 256),)


LLAMA = ctypes.CDLL(library.__file__)
POINTER = ctypes.c_void_p
LLAMA.llama_model_default_params.restype = Parameters
LLAMA.llama_model_load_from_file.argtypes = (ctypes.c_char_p, Parameters)
LLAMA.llama_model_load_from_file.restype = LLAMA.llama_model_get_vocab.restype = POINTER
LLAMA.llama_model_get_vocab.argtypes = LLAMA.llama_model_free.argtypes = (POINTER,)
NUMBERS = (ctypes.c_int32, POINTER, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool)
LLAMA.llama_vocab_get_add_bos.argtypes = LLAMA.llama_vocab_get_add_eos.argtypes = (POINTER,)
LLAMA.llama_vocab_get_add_bos.restype = LLAMA.llama_vocab_get_add_eos.restype = ctypes.c_bool
LLAMA.llama_tokenize.argtypes = (POINTER, ctypes.c_char_p, *NUMBERS)
PIECE = (ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool)
LLAMA.llama_token_to_piece.argtypes = (POINTER, *PIECE)
SAY = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, POINTER)
SAID: list[bytes] = []
LOG = SAY(lambda level, text, _: SAID.append(text))
LLAMA.llama_log_set(LOG, None)


class Vocabulary:
    """The vocabulary of a GGUF file, in llama.cpp."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 2))()
        count = LLAMA.llama_tokenize(self._pointer, data, len(data), ids, len(ids), False, True)
        assert count >= 0
        return list(ids[:count])

    def adds(self) -> tuple[bool, bool]:
        return LLAMA.llama_vocab_get_add_bos(self._pointer), LLAMA.llama_vocab_get_add_eos(self._pointer)

    def piece(self, token_id: int) -> bytes:
        data = ctypes.create_string_buffer(1000)
        count = LLAMA.llama_token_to_piece(self._pointer, token_id, data, len(data), 0, True)
        assert count >= 0
        return data.raw[:count]


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[Vocabulary]:
    parameters = LLAMA.llama_model_default_params()
    assert not any(parameters.bytes[VOCAB_ONLY : VOCAB_ONLY + 2]) and parameters.bytes[VOCAB_ONLY + 2] == 1
    parameters.bytes[VOCAB_ONLY] = 1
    SAID.clear()
    model = LLAMA.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise SystemExit(b"".join(SAID[-5:]).decode())
    yield Vocabulary(LLAMA.llama_model_get_vocab(model))
    LLAMA.llama_model_free(model)


@contextlib.contextmanager
def written(metadata: dict[str, Any]) -> Iterator[Vocabulary]:
    """The vocabulary of a file without tensors."""
    adders = {
        str: lambda writer: writer.add_string,
        bool: lambda writer: writer.add_bool,
        int: lambda writer: writer.add_uint32,
        list: lambda writer: writer.add_array,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in metadata.items():
            adders[type(value)](writer)(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with loaded(path) as vocabulary:
            yield vocabulary


def texts() -> list[str]:
    lines = "".join(topics.values()).splitlines(keepends=True)
    return ["".join(lines[start : start + 3]) for start in range(0, 9000, 3)] + strings() * 6 + OFTEN * 2000


def byte_level() -> dict[str, Any]:
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=12,
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.train_from_iterator(texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens + list(SPECIAL),
        "tokenizer.ggml.token_type": [1] * len(tokens) + SPECIAL_TYPES,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
    }


def by_scores() -> dict[str, Any]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()),
        model_writer=model,
        vocab_size=NUM_TOKENS - len(SPECIAL_SCORED),
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=False,
        split_by_unicode_script=False,
        split_by_number=False,
        max_sentencepiece_length=6,
        num_threads=1,
        minloglevel=2,
    )
    proto = model_pb2.ModelProto.FromString(model.getvalue())
    assert {piece.piece for piece in proto.pieces} > OTHER_TYPES.keys()
    types = [TYPES[OTHER_TYPES[piece.piece]] if piece.piece in OTHER_TYPES else piece.type for piece in proto.pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces] + SPECIAL_SCORED,
        "tokenizer.ggml.scores": [round(piece.score, 1) for piece in proto.pieces] + [0.0] * len(SPECIAL_SCORED),
        "tokenizer.ggml.token_type": types + [TYPES[SPECIAL[token]] for token in SPECIAL_SCORED],
    }


def main(smollm2: Path) -> None:
    FOLDER.mkdir(exist_ok=True)
    chosen = strings()
    metadata = {"byte_level": byte_level(), "sentencepiece": by_scores()}
    found: dict[str, list[list[int]]] = {}
    pieces: dict[str, list[str]] = {}
    add: dict[str, tuple[bool, bool]] = {}

    def tokenize(name: str, vocabulary: Vocabulary, kind: str | None = None) -> None:
        add[name] = vocabulary.adds()
        found[name] = [vocabulary.encode(text) for text in chosen]
        if kind:
            count = len(metadata[kind]["tokenizer.ggml.tokens"])
            pieces[kind] = [vocabulary.piece(index).decode("latin-1") for index in range(count)]

    for name in SPLITS:
        with written(metadata["byte_level"] | {"tokenizer.ggml.pre": name}) as vocabulary:
            tokenize(name, vocabulary, "byte_level")
    for name, more in SENTENCEPIECE.items():
        more = {f"tokenizer.ggml.{key}": value for key, value in more.items()}
        with written(metadata["sentencepiece"] | more) as vocabulary:
            tokenize(name, vocabulary, "sentencepiece")
    with loaded(smollm2) as vocabulary:
        tokenize("smollm2", vocabulary)

    lists: list[list[list[int]]] = []
    which: dict[str, list[int]] = {name: [] for name in found}
    for index in range(len(chosen)):
        distinct: list[list[int]] = []
        for name, ids in found.items():
            if ids[index] not in distinct:
                distinct.append(ids[index])
            which[name].append(distinct.index(ids[index]))
        lists.append(distinct)
    contents = {"strings": chosen, "ids": {"lists": lists, "which": which}, "add": add, "pieces": pieces, **metadata}
    for name, content in contents.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
        print(name, f"{(FOLDER / f'{name}.json').stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
