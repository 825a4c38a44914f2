"""Files that would make endless text of a letter, or another tokenization of it each time."""

import base64
import json

import pytest
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from ksana_jax.tokenizers import TokenizerError, load_tokenizer
from ksana_jax.tokenizers.growth import growth

VOCABULARY = {letter: index for index, letter in enumerate("abcdefg▁ ")} | {"ab": 9, "abc": 10}


@pytest.fixture
def saved(tmp_path):
    """Writes a tokenizer.json with some parts, and returns its folder."""

    def save(model=None, **parts):
        tokenizer = tokenizers.Tokenizer(model or tokenizers.models.BPE(VOCABULARY, [("a", "b"), ("ab", "c")]))
        tokenizer.decoder = parts.pop("decoder", decoders.ByteLevel())
        for name, value in parts.items():
            setattr(tokenizer, name, value)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return save


def replaced(times, old="a", new="a" * 100):
    return normalizers.Sequence([normalizers.Replace(old, new)] * times)


@pytest.mark.parametrize(
    ("normalizer", "most"),
    [
        (replaced(5), "10,000,000,000"),
        (normalizers.Sequence([replaced(1), normalizers.Sequence([normalizers.Lowercase(), replaced(1)])]), "10,000"),
        (normalizers.Replace(tokenizers.Regex("x*"), "ab" * 50), "201"),
        (normalizers.Replace("", "ab" * 50), "201"),
        (normalizers.Sequence([normalizers.Prepend("a" * 60), normalizers.Replace("a", "aa")]), "122"),
        (normalizers.Sequence([normalizers.ByteLevel()] * 7), "128"),
    ],
)
def test_a_normaliser_that_blows_up_is_refused_with_the_number(saved, normalizer, most):
    with pytest.raises(TokenizerError, match=rf"encoding can turn one character into {most}; supported: at most 100"):
        load_tokenizer(saved(normalizer=normalizer))


def test_pre_tokenizers_and_decoders_count_too(saved):
    levels = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)] * 5)
    normalizer = normalizers.Sequence([normalizers.Replace("a", "aaaa")])
    with pytest.raises(TokenizerError, match="encoding can turn one character into 128;"):
        load_tokenizer(saved(normalizer=normalizer, pre_tokenizer=levels))
    with pytest.raises(TokenizerError, match="decoding can turn one character into 10,000,000,000;"):
        load_tokenizer(saved(decoder=decoders.Sequence([decoders.Replace("a", "a" * 100)] * 5)))


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"type": "Replace", "pattern": {"String": "aa"}, "content": "xyz"}, "aaaa"),
        ({"type": "Replace", "pattern": {"String": ""}, "content": "xyz"}, "a"),
        ({"type": "Replace", "pattern": {"Regex": "b*"}, "content": "xyz"}, "aaa"),
        ({"type": "Prepend", "prepend": "__"}, "a"),
        ({"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 4}, "é"),
    ],
)
def test_what_the_library_does_stays_within_the_bound(step, text):
    tokenizer = tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": step,
                "pre_tokenizer": None,
                "post_processor": None,
                "decoder": None,
                "truncation": None,
                "padding": None,
                "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
            }
        )
    )
    longer = len(tokenizer.normalizer.normalize_str(text))
    assert len(text) < longer <= growth(step, len(text))


def test_a_compiled_table_counts_with_its_longest_replacement():
    table = (4).to_bytes(4, "little") + b"trie" + "ab\0ﷺ = eighteen\0c\0".encode()
    assert growth({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}) == 12


def test_published_chains_of_steps_are_within_the_bound(saved):
    t5 = [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), "▁"), normalizers.Strip()]
    xlnet = [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    for chain in (t5, xlnet, [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]):
        load_tokenizer(saved(normalizer=normalizers.Sequence(chain)))


def test_dropout_of_a_file_is_off(saved):
    folder = saved(tokenizers.models.BPE(VOCABULARY, [("a", "b"), ("ab", "c")], dropout=0.5))
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len({tuple(raw.encode("abcabcabc").ids) for _ in range(50)}) > 1
    tokenizer = load_tokenizer(folder)
    assert {tuple(tokenizer.encode("abcabcabc")) for _ in range(50)} == {(10, 10, 10)}
