"""Tokenizers of GGUF files: the ids that llama.cpp gives, and one clear line for metadata that cannot be used."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from ksana_jax.tokenizers import IncrementalDetokenizer, TokenizerError, load_tokenizer
from ksana_jax.tokenizers.gguf_endings import INFILL, INFILL_ENDS, TURN_ENDS
from ksana_jax.tokenizers.gguf_splits import SPLITS
from ksana_jax.tokenizers.gguf_tokenizer import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    gguf_tokenizer,
    special_ids,
)
from tests import real

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf_tokenizers"


@functools.cache
def stored(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


STRINGS = stored("strings")
SENTENCEPIECE = {"llama": {}, "llama-without-prefix": {"add_space_prefix": False}}
NAMES = [*SPLITS, *SENTENCEPIECE]


def metadata(name, **more):
    """What the small file has, whose tokenizer has that name in the stored ids."""
    if name in SENTENCEPIECE:
        values, more = stored("sentencepiece"), SENTENCEPIECE[name] | more
    else:
        values, more = stored("byte_level"), {"pre": name} | more
    values = values | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
    numbers = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
    arrays = {key: np.asarray(values[key]) for key in numbers if isinstance(values.get(key), list)}
    return {key: value for key, value in (values | arrays).items() if value is not None}


def make(name, **more):
    return gguf_tokenizer(metadata(name, **more), "small.gguf")


def differing(tokenizer, name):
    """The strings that get other ids than llama.cpp's."""
    which, lists = stored("ids")["which"][name], stored("ids")["lists"]
    expected = (lists[index][chosen] for index, chosen in enumerate(which))
    return [text for text, ids in zip(STRINGS, expected, strict=True) if tokenizer.encode(text, False) != ids]


def test_every_name_was_compared_with_llama_cpp():
    assert {*NAMES, "smollm2"} == stored("ids")["which"].keys()
    assert len(STRINGS) > 500


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_llama_cpp(name):
    assert differing(make(name), name) == []


def test_stored_ids_tell_splits_apart():
    which = stored("ids")["which"]
    different = {split[:2]: name for name, split in SPLITS.items()}.values()
    assert all(which[one] != which[other] for one in different for other in different if one != other)


@pytest.mark.parametrize("name", NAMES)
def test_bos_and_eos_are_added_where_llama_cpp_adds_them(name):
    bos, eos = stored("add")[name]
    plain = make(name)
    text = plain.encode("the fox", False)
    assert plain.encode("the fox") == [plain.bos_id] * bos + text + [plain.eos_id] * eos
    assert make(name, add_bos_token=False).encode("the fox") == text
    both = make(name, add_bos_token=True, add_eos_token=True)
    assert both.encode("the fox") == [both.bos_id, *text, both.eos_id]
    assert both.encode("") == [both.bos_id, both.eos_id]
    assert both.encode("the fox", False) == text


@real.smollm2
def test_real_file_gives_the_ids_of_llama_cpp():
    tokenizer = load_tokenizer("smollm2")
    assert differing(tokenizer, "smollm2") == []
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.encode("hi") == tokenizer.encode("hi", False)
    assert tokenizer.chat_template and "<|im_start|>" in tokenizer.chat_template


@pytest.mark.parametrize(("name", "kind"), [("gpt-2", "byte_level"), ("llama", "sentencepiece")])
def test_pieces_are_those_of_llama_cpp(name, kind):
    tokenizer = make(name)
    # llama.cpp shows nothing for unused tokens, and the mark for a space in user-defined ones: neither would give back
    # the text that they stand for.
    texts = {"[PAD7]": b"[PAD7]"} | ({} if kind == "byte_level" else {"in": b"in", "▁the": b" the"})
    tokens = metadata(name)["tokenizer.ggml.tokens"]
    pieces = [texts.get(token, piece.encode("latin-1")) for token, piece in zip(tokens, stored("pieces")[kind])]
    assert [tokenizer.piece(index).data for index in range(tokenizer.vocab_size)] == pieces


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "tekken", "llama", "llama-without-prefix"])
def test_text_in_parts_is_the_text_that_was_encoded(name):
    tokenizer = make(name)
    for text in STRINGS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == "".join(shown(tokenizer, ids, True))
        *parts, rest = shown(tokenizer, ids, False)
        if name in SENTENCEPIECE:
            continue  # their mark for spaces, and the space after special tokens, do not come back
        assert "".join(parts).removeprefix(tokenizer.bos_token * stored("add")[name][0]) == text and rest == ""


def shown(tokenizer, ids, skip_special_tokens):
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    return [*(stream.push([token_id]) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_text_comes_back_without_special_tokens(name):
    tokenizer = make(name)
    special = ("<|", "<think>", "<｜", "two  words", "\n\n\n", "¡é…", "ñandú", "▁", "<s>", "</s>", "<unk>")
    texts = [text for text in STRINGS if not any(token in text for token in special)]
    assert len(texts) > 400
    assert [text for text in texts if tokenizer.decode(tokenizer.encode(text)) != text] == []


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
def test_ids_that_stand_for_no_token_keep_no_file_from_loading(none):
    values = metadata("gpt-2", bos_token_id=NUM, eos_token_id=none, eot_token_id=none)
    assert special_ids(values, "small.gguf") == (None, (IM_END,))
    tokenizer = gguf_tokenizer(values, "small.gguf")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_id, tokenizer.eos_ids) == ("", "", None, (IM_END,))
    assert tokenizer.encode("the fox") == make("gpt-2").encode("the fox")


def test_ids_that_end_a_text_are_those_that_the_file_names_and_then_those_with_such_a_text():
    values = metadata("llama3", eos_token_id=5, eot_token_id=590, eom_token_id=5)
    assert special_ids(values, "small.gguf") == (values["tokenizer.ggml.bos_token_id"], (5, 590, IM_END))
    tokenizer = gguf_tokenizer(values, "small.gguf")
    assert (tokenizer.eos_id, tokenizer.eos_ids) == (5, (5, 590, IM_END))
    assert special_ids(metadata("gpt-2", bos_token_id=None, eos_token_id=None), "small.gguf") == (None, (IM_END,))
    assert special_ids(metadata("llama"), "small.gguf") == (1, (2, SCORED.index("<|im_end|>")))  # SentencePiece's own
    assert (make("llama").bos_token, make("llama").eos_token) == ("<s>", "</s>")


def with_tokens(name, texts, kind, **more):
    """A file whose vocabulary has more tokens, from id 600, all of one type."""
    values = stored("sentencepiece" if name in SENTENCEPIECE else "byte_level")
    more["tokens"] = [*values["tokenizer.ggml.tokens"], *texts]
    more["token_type"] = [*values["tokenizer.ggml.token_type"], *[kind] * len(texts)]
    if name in SENTENCEPIECE:
        more["scores"] = [*values["tokenizer.ggml.scores"], *[0.0] * len(texts)]
    return metadata(name, **more)


FIRST, LATER, LAST = 600, 601, 602
# Texts and keys of a file, and what llama.cpp's llama_vocab_is_eog answers, apart from the small files' own ends.
ENDINGS = {
    **{text: ([text], {}, [FIRST]) for text in TURN_ENDS if text not in ("</s>", "<|im_end|>")},
    **{text: ([text], {}, [FIRST] * (key in INFILL_ENDS)) for key, texts in INFILL.items() for text in texts},
    "another": (["<|other|>", "<|im_end|>x"], {}, []),
    "gpt-oss": (["<|end|>", "<|return|>", "<|call|>"], {}, [LATER, LAST]),
    "solar": (["<|end|>", "<|calls|>", "<|flush|>"], {}, [LATER, LAST]),
    "no call": (["<|end|>", "<|return|>", "<|flush|>"], {}, [FIRST, LATER, LAST]),
    "named": (["<|end|>", "<|return|>", "<|call|>"], {"eot_token_id": FIRST}, [LATER, LAST]),
    "another is named": (["<|fim_pad|>", "<|fim_prefix|>"], {"fim_pad_token_id": LATER}, [LATER]),
}


@pytest.mark.parametrize("name", ["gpt-2", "llama"])
@pytest.mark.parametrize("case", ENDINGS)
def test_tokens_that_end_a_turn_by_their_text_are_those_of_llama_cpp_and_one_id(case, name):
    texts, keys, ends = ENDINGS[case]
    for kind in (NORMAL, CONTROL, USER_DEFINED, UNUSED):
        values = with_tokens(name, texts, kind, **keys)
        tokenizer = gguf_tokenizer(values, "small.gguf")
        assert sorted(set(tokenizer.eos_ids) - set(make(name).eos_ids)) == ends
        assert set(special_ids(values, "small.gguf").eos) == set(tokenizer.eos_ids)
        for index in ends:
            found = tokenizer.encode(f"x{texts[index - FIRST]}y", False)
            assert index in found and (len(found) == 3 or name in SENTENCEPIECE)
            assert tokenizer.decode(found).replace(" ", "") == "xy"


def test_token_that_begins_another_message_does_not_end_a_text_even_if_it_is_named_eos():
    values = with_tokens("gpt-2", ["<|end|>", "<|return|>", "<|call|>"], CONTROL, eos_token_id=FIRST)
    tokenizer = gguf_tokenizer(values, "small.gguf")
    assert sorted(tokenizer.eos_ids) == [IM_END, LATER, LAST]
    assert (tokenizer.eos_id, tokenizer.eos_token) == (None, "<|end|>")


def test_gemma_4_does_not_end_a_text_at_the_end_of_a_strikethrough():
    assert TOKENS.count("</s>") == 0
    for text, ends in (("<eos>", [IM_END, FIRST, LATER]), ("<|tool_response>", [IM_END, LATER])):
        values = with_tokens("gpt-2", ["</s>", text], USER_DEFINED)
        assert sorted(gguf_tokenizer(values, "small.gguf").eos_ids) == ends


def test_chat_template_is_that_of_the_file():
    assert make("gpt-2").chat_template is None
    assert gguf_tokenizer(metadata("gpt-2") | {"tokenizer.chat_template": "{{ x }}"}, "f").chat_template == "{{ x }}"


def test_file_without_token_types_has_ordinary_tokens_and_those_that_end_a_turn():
    tokenizer = make("gpt-2", token_type=None)
    assert len(tokenizer.encode("<|im_start|>")) > 1 and tokenizer.encode("<|im_end|>") == [IM_END]
    assert tokenizer.encode("the fox") == make("gpt-2").encode("the fox")


def test_vocabulary_that_marks_no_token_as_unknown_loads():
    types = stored("sentencepiece")["tokenizer.ggml.token_type"]
    assert types.count(UNKNOWN) == 1  # Gemma-3-270M's file has none, and names the token in unknown_token_id
    tokenizer = make("llama", token_type=[CONTROL if kind == UNKNOWN else kind for kind in types], unknown_token_id=0)
    assert tokenizer.named_tokens["unk_token"] == "<unk>"
    assert tokenizer.encode("the fox") == make("llama").encode("the fox")


def test_empty_token_does_not_take_the_place_of_another():
    tokens = [*stored("byte_level")["tokenizer.ggml.tokens"], ""]
    tokenizer = make("gpt-2", tokens=tokens, token_type=[*stored("byte_level")["tokenizer.ggml.token_type"], 1])
    assert tokenizer.vocab_size == len(tokens)
    assert differing(tokenizer, "gpt-2") == []


TOKENS, SCORED = (stored(kind)["tokenizer.ggml.tokens"] for kind in ("byte_level", "sentencepiece"))
MERGES = stored("byte_level")["tokenizer.ggml.merges"]
NUM, IM_END = len(TOKENS), TOKENS.index("<|im_end|>")
BROKEN = {
    "model": ("gpt-2", {"model": "t5"}, "model is 't5'; supported: gpt2, llama"),
    "no model": ("gpt-2", {"model": None}, "model is None; supported: gpt2, llama"),
    "model is a number": ("gpt-2", {"model": 3}, "model is 3; supported: gpt2, llama"),
    "pre": ("gpt-2", {"pre": "chameleon"}, "pre is 'chameleon'; supported: default, gpt-2, phi-2"),
    "no pre": ("gpt-2", {"pre": None}, "pre is missing: convert the model again; supported: default"),
    "no tokens": ("gpt-2", {"tokens": None}, "tokens is missing"),
    "empty tokens": ("llama", {"tokens": []}, "tokens must be a list of strings, at least one"),
    "array of tokens": ("llama", {"tokens": np.arange(3)}, "tokens must be a list of strings"),
    "token twice": ("gpt-2", {"tokens": [*TOKENS[:-1], "!"]}, f"tokens has '!' twice, at 0 and {NUM - 1}"),
    "piece twice": ("llama", {"tokens": [*SCORED[:-1], "<s>"]}, f"tokens has '<s>' twice, at 1 and {len(SCORED) - 1}"),
    "types": ("gpt-2", {"token_type": [1, 2]}, f"token_type has 2 values, the vocabulary has {NUM} tokens"),
    "one type": ("gpt-2", {"token_type": 3}, f"token_type has 1 values, the vocabulary has {NUM}"),
    "no merges": ("gpt-2", {"merges": None}, "merges is missing"),
    "merge of one": ("gpt-2", {"merges": ["in"]}, "merges has 'in' at index 0, must be two tokens that make a third"),
    "merge of none": ("gpt-2", {"merges": [*MERGES, "! zz"]}, f"merges has '! zz' at index {len(MERGES)}"),
    "merge of unknown": ("gpt-2", {"merges": ['! "']}, "merges has '! \"' at index 0"),
    "bos": ("gpt-2", {"bos_token_id": -2}, f"bos_token_id is -2, must be an id below {NUM}"),
    "eos": ("gpt-2", {"eos_token_id": NUM}, f"eos_token_id is {NUM}, must be an id below {NUM}"),
    "bos to add": ("gpt-2", {"bos_token_id": NUM, "add_bos_token": True}, "but bos_token_id names no token"),
    "eot": ("llama", {"eot_token_id": 10**9}, "eot_token_id is 1000000000, must be an id below"),
    "eom": ("llama", {"eom_token_id": "2"}, "eom_token_id is '2', must be an id below"),
    "several eos": ("llama", {"eos_token_id": np.arange(2)}, r"eos_token_id is array\(\[0, 1\]\), must be an id below"),
    "nothing to add": (
        "gpt-2",
        {"add_eos_token": True, "eos_token_id": None},
        "add_eos_token is true, but eos_token_id names no token",
    ),
    "llama3 without": ("llama3", {"bos_token_id": None}, "add_bos_token is true, but bos_token_id names no token"),
    "no scores": ("llama", {"scores": None}, "scores is missing"),
    "no types": ("llama", {"token_type": None}, "token_type is missing"),
    "no unknown": ("llama", {"token_type": [1] * len(SCORED)}, "is not a SentencePiece model: .*unk"),
    "bytes": ("llama", {"token_type": [2] + [6] * (len(SCORED) - 1)}, "is not a SentencePiece model"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_metadata_is_named_in_one_line(case):
    name, changes, message = BROKEN[case]
    with pytest.raises(TokenizerError, match=message) as caught:
        make(name, **changes)
    assert str(caught.value).startswith("small.gguf") and "\n" not in str(caught.value)
    assert len(str(caught.value)) < 900
