"""Text that comes token by token is the text of all tokens, and never shows half a character."""

import itertools
import json

import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from ksana_jax.tokenizers import IncrementalDetokenizer, load_tokenizer

KINDS = [
    "sentencepiece",
    "sentencepiece-llama",
    "sentencepiece-exact",
    "sentencepiece-no-bytes",
    "byte-level",
    "llama-like",
    "metaspace",
]
WITH_BYTES = [kind for kind in KINDS if kind not in ("sentencepiece-no-bytes", "metaspace")]
# Characters of one to four bytes, joined emoji and spaces everywhere: more telling than uniform code points.
texts = st.text(
    alphabet=st.sampled_from(list("ab the  \n\t{é日本😀👩‍🚀\u200dЖ▁<>|\0")) | st.characters(codec="utf-8"), max_size=40
)


@pytest.fixture(scope="module")
def load(directories):
    loaded = {name: load_tokenizer(directory) for name, directory in directories.items()}
    return loaded.__getitem__


@pytest.fixture(scope="module")
def library_decode(directories):
    """What the library behind each kind makes of ids, without special tokens."""

    def decode(kind, ids):
        if kind.startswith("sentencepiece"):
            return models[kind].decode(ids)
        return models[kind].decode(ids, skip_special_tokens=True)

    models = {}
    for kind, path in directories.items():
        if kind.startswith("sentencepiece"):
            models[kind] = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
        else:
            models[kind] = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return decode


def deltas(tokenizer, ids, sizes, skip_special_tokens=True):
    """Text of ids pushed in groups of those sizes, over and over; the last is what flush gave."""
    stream, found, turn = IncrementalDetokenizer(tokenizer, skip_special_tokens), [], itertools.cycle(sizes)
    left = list(ids)
    while left:
        size = next(turn)
        found.append(stream.push(left[:size]))
        del left[:size]
    return [*found, stream.flush()]


# A step may bring no token at all.
sizes = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any)


@pytest.mark.parametrize("kind", KINDS)
def test_text_in_parts_is_the_text_of_all_tokens(load, kind):
    tokenizer = load(kind)

    @given(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40), sizes, st.booleans())
    def check(ids, sizes, skip):
        assert "".join(deltas(tokenizer, ids, sizes, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)

    check()


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_text_comes_whole_and_at_once_for_every_string(load, library_decode, kind):
    tokenizer = load(kind)

    @given(texts, sizes)
    @example("  the", [1])
    @example("   ", [1])
    def check(text, sizes):
        ids = tokenizer.encode(text, add_special_tokens=False)
        *parts, rest = deltas(tokenizer, ids, sizes)
        assert "".join(parts) == library_decode(kind, ids)
        assert rest == ""
        if "\ufffd" not in text:
            assert "\ufffd" not in "".join(parts)

    check()


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece-exact"])
def test_every_string_survives_the_round_trip(load, kind):
    tokenizer = load(kind)

    @given(texts)
    def check(text):
        text = text.replace("▁", "_") if kind.startswith("sentencepiece") else text  # its own mark for a space
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama-like"])
def test_random_ids_give_the_library_s_text(load, library_decode, kind):
    # llama-like is left out: its library turns a whole run of bytes into U+FFFD when any byte of it is wrong, which no
    # text that is shown as it comes can know.
    tokenizer = load(kind)
    ordinary = [i for i in range(tokenizer.vocab_size) if not tokenizer.piece(i).special]

    @given(st.lists(st.sampled_from(ordinary), max_size=40))
    def check(ids):
        assert tokenizer.decode(ids) == library_decode(kind, ids)

    check()


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_character_of_several_tokens_appears_with_its_last(load, kind):
    tokenizer = load(kind)
    ids = tokenizer.encode("ab 😀", add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer)
    parts = [stream.push([token_id]) for token_id in ids]
    assert parts[-4:] == ["", "", "", "😀"]
    assert "".join(parts) == "ab 😀"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("sentencepiece")])
def test_spaces_at_the_start_are_those_of_sentencepiece(load, library_decode, kind):
    tokenizer = load(kind)
    pieces = {
        tokenizer.piece(i).data: i for i in reversed(range(tokenizer.vocab_size)) if not tokenizer.piece(i).special
    }
    space, word, byte = pieces[b" "], pieces[b" t"], pieces.get(b"\xff", pieces[b" "])
    for ids in (
        [space],
        [space] * 3,
        [space, word],
        [space, space, word, word],
        [byte, space],
        [byte, word],
        [0, word],
    ):
        assert tokenizer.decode(ids) == library_decode(kind, ids)


@pytest.mark.parametrize(("kind", "wrong"), [("byte-level", "\ufffd"), ("sentencepiece-exact", "\ufffd\ufffd")])
def test_bytes_that_never_become_a_character_appear_when_that_is_certain(load, kind, wrong):
    tokenizer = load(kind)
    first, second, *_ = tokenizer.encode("😀", add_special_tokens=False)
    letter = tokenizer.encode("a", add_special_tokens=False)
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push([first, second]) == ""
    assert stream.push(letter) == wrong + "a"
    assert stream.push([first, second]) == ""
    assert stream.flush() == wrong
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-llama", "llama-like", "metaspace"])
def test_first_word_loses_its_space_and_keeps_it_after_a_prompt(load, kind):
    tokenizer = load(kind)
    prompt = tokenizer.encode("the")
    both = tokenizer.encode("the the")
    assert both[: len(prompt)] == prompt
    assert IncrementalDetokenizer(tokenizer).push(both[len(prompt) :]) == "the"
    assert IncrementalDetokenizer(tokenizer, context=prompt).push(both[len(prompt) :]) == " the"


def test_prompt_that_ends_within_a_character_is_completed(load):
    tokenizer = load("byte-level")
    ids = tokenizer.encode("x" * 50 + "😀 ok")
    cut = max(i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    assert IncrementalDetokenizer(tokenizer, context=ids[:cut]).push(ids[cut:]) == "😀 ok"


def test_special_tokens_appear_only_when_asked_for(load):
    tokenizer = load("byte-level")
    ids = tokenizer.encode("<|im_start|>a<think>b two words<|im_end|>")
    assert tokenizer.decode(ids) == "a<think>b two words"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|begin|><|im_start|>a<think>b two words<|im_end|>"
    tokenizer = load("sentencepiece-exact")
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "<s>a"


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_give_no_text(load, kind):
    tokenizer = load(kind)
    ids = tokenizer.encode("the cat")
    stray = [-1, tokenizer.vocab_size, 2**31 - 1]
    assert tokenizer.decode([*stray, *ids, *stray]) == tokenizer.decode(ids)


def test_work_per_token_does_not_grow_with_the_text(load):
    tokenizer, calls = load("byte-level"), 0
    ids = tokenizer.encode("a long text about keys and values 😀 ") * 200

    class Counting:
        byte_errors, strip_start = tokenizer.byte_errors, tokenizer.strip_start

        def piece(self, token_id):
            nonlocal calls
            calls += 1
            return tokenizer.piece(token_id)

    stream = IncrementalDetokenizer(Counting(), context=ids)
    assert calls <= 32  # of a long prompt, only its end is looked at
    calls = 0
    assert "".join(stream.push([token_id]) for token_id in ids) == tokenizer.decode(ids)
    assert calls == len(ids)


def test_byte_level_alphabet_is_the_library_s(directories):
    vocabulary = json.loads((directories["byte-level"] / "tokenizer.json").read_text())["model"]["vocab"]
    tokenizer = load_tokenizer(directories["byte-level"])
    singles = {tokenizer.piece(i).data for text, i in vocabulary.items() if len(text) == 1}
    assert singles == {bytes([byte]) for byte in range(256)}


def test_added_token_of_latin_letters_is_text_and_not_bytes(directories, tmp_path):
    # In a byte-level vocabulary, "é" stands for a byte. The library takes these tokens for bytes, and shows U+FFFD.
    raw = tokenizers.Tokenizer.from_file(str(directories["byte-level"] / "tokenizer.json"))
    raw.add_tokens(["né"])
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("née 重")) == "née 重"  # whose first byte is "é"
    assert raw.decode(raw.encode("née").ids) == "n\ufffde"
