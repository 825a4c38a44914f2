"""Reading a directory: which file counts, what begins a text, and one clear line where it cannot be."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

import ksana_jax.tokenizers.files as files
from ksana_jax.core.errors import LoadError
from ksana_jax.tokenizers import TokenizerError, find_tokenizer, load_tokenizer
from tests.gguf_writer import write_gguf


@pytest.fixture
def directory(directories, tmp_path):
    """A copy of a directory that a test may change."""

    def copy(kind):
        return shutil.copytree(directories[kind], tmp_path / kind)

    return copy


def test_gguf_file_has_its_own_tokenizer_or_none(directory, tmp_path):
    values = json.loads((Path(__file__).parents[1] / "golden" / "gguf_tokenizers" / "byte_level.json").read_text())
    path = directory("llama-like") / "model.gguf"
    write_gguf(path, values | {"tokenizer.ggml.pre": "qwen2"})
    assert find_tokenizer(path).encode("the cache") == load_tokenizer(path).encode("the cache") != []
    assert load_tokenizer(path).vocab_size == find_tokenizer(path.parent).vocab_size == 600  # not the tokenizer.json
    for absent in ({}, {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}):
        assert find_tokenizer(write_gguf(path, absent)) is None
        with pytest.raises(TokenizerError, match=r"model\.gguf has no tokenizer"):
            load_tokenizer(path)
    for model, problem in (("bert", "is 'bert'"), ([1, 2], "is array")):
        with pytest.raises(TokenizerError, match=rf"tokenizer\.ggml\.model {problem}"):
            find_tokenizer(write_gguf(path, values | {"tokenizer.ggml.model": model}))
    path.write_bytes(b"GGUF")
    with pytest.raises(LoadError, match="truncated"):
        find_tokenizer(path)


def configure(path, **values):
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    return load_tokenizer(path)


def test_bos_comes_first_by_default_and_as_the_config_says(directory):
    path = directory("sentencepiece-llama")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, 2, (2,), 420)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    plain = tokenizer.encode("the cache", add_special_tokens=False)
    assert tokenizer.encode("the cache") == [1, *plain]
    assert configure(path, add_bos_token=False).encode("the cache") == plain
    assert configure(path, add_eos_token=True).encode("the cache") == [1, *plain, 2]


def test_bos_follows_the_post_processor_of_a_tokenizer_json(directories):
    tokenizer = load_tokenizer(directories["byte-level"])
    begin, end = tokenizer.encode("<|begin|><|im_end|>", add_special_tokens=False)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (begin, end)
    assert tokenizer.encode("a") == [begin, *tokenizer.encode("a", add_special_tokens=False)]
    assert tokenizer.encode("") == [begin]


def test_model_without_bos_adds_none(directory):
    path = directory("llama-like")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (None, None, ())
    assert tokenizer.encode("the") == tokenizer.encode("the", add_special_tokens=False)


def test_special_tokens_map_names_what_the_config_leaves_out(directory):
    path = directory("llama-like")
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}))
    tokenizer = configure(path, eos_token="<unk>")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 0)


def test_tokenizer_json_counts_where_both_are_there(directory, directories):
    path = directory("byte-level")
    shutil.copy(directories["sentencepiece"] / "tokenizer.model", path)
    assert load_tokenizer(path).source.endswith("tokenizer.json")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        load_tokenizer(path)


def test_tokens_written_out_in_a_text_become_their_ids(directory):
    path = directory("sentencepiece-llama")
    (path / "added_tokens.json").write_text(json.dumps({"<pad>": 420}))
    added = {
        "421": {"content": "<|im_start|>", "special": True},
        "422": {"content": "<|im_start|>x", "special": False},
        "423": {"content": "<|end|>", "special": True, "rstrip": True, "lstrip": True},
    }
    tokenizer = configure(path, added_tokens_decoder=added)
    assert tokenizer.vocab_size == 424

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    assert encode("<s></s><pad><|im_start|>") == [1, 2, 420, 421]
    assert encode("<|im_start|>x<|im_start|>") == [422, 421]  # the longest
    assert encode("the <|end|>  the") == [*encode("the"), 423, *tokenizer.encode("<s>the", False)[1:]]
    assert encode("<|end|>  the<s>") == [*encode("<|end|>the"), 1]
    assert tokenizer.decode([421, 422, *encode("the")]) == "<|im_start|>x the"
    assert tokenizer.decode([421, *encode("the")], skip_special_tokens=False) == "<|im_start|> the"


def test_tokens_that_only_tokenizer_config_declares_are_encoded_and_decoded(directory):
    path = directory("llama-like")
    without = load_tokenizer(path)
    turn, tool = without.vocab_size, without.vocab_size + 1
    added = {
        str(tool): {"content": "<tool>", "special": False, "normalized": False},
        str(turn): {"content": "<|turn|>", "special": True},
        "1": {"content": "<s>", "special": True},  # of the tokenizer.json
    }
    tokenizer = configure(path, added_tokens_decoder=added, eos_token="<|turn|>")
    assert tokenizer.encode("<|turn|><tool><|turn|>", False)[-3:] == [turn, tool, turn]
    assert tokenizer.encode("the", False) == without.encode("the", False)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (tool + 1, turn)
    assert tokenizer.decode([turn, tool]) == "<tool>"
    assert tokenizer.decode([turn, tool], skip_special_tokens=False) == "<|turn|><tool>"


# tokenizer_config.json, special_tokens_map.json, and whether transformers 5.24.0 takes WORD in a text for one token.
WORD = "Ġthe"
NAMED = {
    "nothing names it": ({}, {}, False),
    "config": ({"pad_token": WORD}, {}, True),
    "of a model": ({"image_token": {"content": WORD, "lstrip": False}}, {}, True),
    "extra": ({"extra_special_tokens": [WORD]}, {}, True),
    "extra by name": ({"extra_special_tokens": {"image_token": WORD}}, {}, True),
    "additional": ({}, {"additional_special_tokens": [WORD]}, True),
    "map": ({"pad_token": "<none such>", "add_bos_token": True}, {"pad_token": WORD}, True),
    "map beside a complete config": ({"added_tokens_decoder": {}}, {"pad_token": WORD}, False),
    "complete config": ({"pad_token": WORD, "added_tokens_decoder": {}}, {}, True),
    "split": ({"pad_token": WORD, "split_special_tokens": True}, {}, False),
}


@pytest.mark.parametrize("config, older, is_one", NAMED.values(), ids=NAMED)
def test_a_token_of_the_vocabulary_that_a_file_names_as_special_is_matched_in_texts(directory, config, older, is_one):
    path = directory("byte-level")
    token = load_tokenizer(path).encode(" the", False)
    (path / "special_tokens_map.json").write_text(json.dumps(older))
    tokenizer = configure(path, **config)
    assert (tokenizer.encode(WORD, False) == token) is is_one
    special = is_one or "split_special_tokens" in config
    assert tokenizer.decode(token) == ("" if special else " the")


def test_a_named_token_consumes_white_space_as_its_object_says(directory):
    tokenizer = configure(directory("byte-level"), pad_token={"content": WORD, "lstrip": True, "rstrip": True})
    assert tokenizer.encode(f"a  {WORD} a", False) == tokenizer.encode(f"a{WORD}a", False)


def test_files_that_give_an_added_token_two_ids_are_refused(directory):
    path = directory("llama-like")
    size = load_tokenizer(path).vocab_size
    said = rf"tokenizer\.json: '<\|turn\|>' gets id {size}, tokenizer_config\.json gives it {size + 5}"
    with pytest.raises(TokenizerError, match=said):
        configure(path, added_tokens_decoder={str(size + 5): {"content": "<|turn|>"}})


def test_space_is_put_before_the_first_word_only_unless_the_files_are_legacy(directory):
    path = directory("sentencepiece-llama")
    tokenizer = load_tokenizer(path)
    with_space = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("<s>the", False)[1:] != with_space
    assert tokenizer.decode(tokenizer.encode("the<s>the", False)) == "thethe"
    assert configure(path, legacy=True).encode("<s>the", False) == [1, *with_space]


def test_truncation_and_padding_of_a_tokenizer_json_are_not_for_prompts(directory):
    path = directory("byte-level")
    whole = load_tokenizer(path).encode("a text of more than four tokens")
    raw = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=100)
    raw.save(str(path / "tokenizer.json"))
    assert load_tokenizer(path).encode("a text of more than four tokens") == whole
    assert 4 < len(whole) < 100


@pytest.mark.parametrize("text", [b"bytes", None, 3, ["a"]])
def test_only_strings_are_encoded(directories, text):
    with pytest.raises(ValueError, match="must be a string"):
        load_tokenizer(directories["byte-level"]).encode(text)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_half_of_a_surrogate_pair_is_refused(directories, kind):
    with pytest.raises(ValueError, match="surrogate pair at character 2"):
        load_tokenizer(directories[kind]).encode("ab\ud83d")


def test_vocabulary_that_cannot_express_a_text_is_refused(directory):
    path = directory("byte-level")
    model = tokenizers.models.WordLevel({"a": 0}, unk_token="[UNK]")
    raw = tokenizers.Tokenizer(model)
    raw.decoder = tokenizers.decoders.ByteLevel()
    (path / "tokenizer_config.json").unlink()
    raw.save(str(path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot encode"):
        load_tokenizer(path).encode("b")


def test_a_regular_expression_that_gives_up_is_one_sentence(directory):
    path = directory("byte-level")
    raw = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(x+x+)+y"), "isolated")
    raw.save(str(path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"cannot encode: a regular expression .* gives up on the text$"):
        load_tokenizer(path).encode("x" * 40)
    assert load_tokenizer(path).encode("x")


def test_dropout_of_a_file_is_off(tmp_path):
    vocabulary = {letter: index for index, letter in enumerate("abc")} | {"ab": 3, "abc": 4}
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b"), ("ab", "c")], dropout=0.5))
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.save(str(tmp_path / "tokenizer.json"))
    assert len({tuple(raw.encode("abcabcabc").ids) for _ in range(50)}) > 1
    tokenizer = load_tokenizer(tmp_path)
    assert {tuple(tokenizer.encode("abcabcabc")) for _ in range(50)} == {(4, 4, 4)}


BROKEN = {
    "tokenizer.json": [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"model": {"type": "BPE"}}',
        b"[" * 100_000,
        b"null",
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["x y"]}}',
    ],
    "tokenizer.model": [b"", b"not a model", b"\x00" * 1000, b"IQ== 0\nIg== 1\n", b"\x0a\xff\xff\xff\xff\x0f"],
    "tokenizer_config.json": [
        b"",
        b"[",
        b"[]",
        b'{"bos_token": 3}',
        b'{"bos_token": "<none>"}',
        b"[" * 100_000,
        b'{"added_tokens_decoder": {"x": {"content": "a"}}}',
        b'{"added_tokens_decoder": {"-1": {"content": "a"}}}',
        b'{"added_tokens_decoder": {"1": "a"}}',
        b'{"added_tokens_decoder": [1]}',
    ],
    "added_tokens.json": [b"[]", b'{"<x>": -1}', b'{"<x>": "1"}', b'{"<x>": true}', b'{"": 5}', b'{"<x>": 1e99}'],
    "special_tokens_map.json": [b"{", b'{"eos_token": ["a"]}'],
}


@pytest.mark.parametrize(
    ("name", "data"),
    [(name, data) for name, cases in BROKEN.items() for data in cases],
    ids=lambda value: repr(value[:45]),
)
def test_broken_file_is_named_in_one_line(directory, name, data):
    path = directory("byte-level" if name == "tokenizer.json" else "sentencepiece")
    (path / name).write_bytes(data)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(path)
    message = str(caught.value)
    source = "tokenizer.model" if b"<none>" in data else name  # where the token is looked for
    assert source in message and "\n" not in message and len(message) < 600


@pytest.mark.parametrize("cut", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["sentencepiece", "byte-level"])
def test_file_that_was_cut_short_never_ends_in_the_library_s_error(directory, kind, cut):
    path = directory(kind)
    file = path / ("tokenizer.model" if kind == "sentencepiece" else "tokenizer.json")
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(TokenizerError, match=file.name):
        load_tokenizer(path)


def test_decoder_that_is_not_supported_is_named_with_those_that_are(directory):
    path = directory("llama-like")
    raw = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.decoder = tokenizers.decoders.WordPiece()
    raw.save(str(path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decoder WordPiece is not supported; supported: ByteLevel"):
        load_tokenizer(path)


def test_large_files_are_not_read(directory, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model has [\d,]+ bytes; supported: at most 1,000"):
        load_tokenizer(directory("sentencepiece"))


def test_directory_without_a_tokenizer_says_what_is_supported(tmp_path):
    with pytest.raises(TokenizerError, match=r"has no tokenizer; supported: tokenizer\.json or tokenizer\.model"):
        load_tokenizer(tmp_path)
    with pytest.raises(LoadError, match=r"there is no model '.*nowhere'"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing or not a file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["sentencepiece-llama", "byte-level", "llama-like"])
def test_ids_and_text_are_those_of_transformers(directory, kind):
    transformers = pytest.importorskip("transformers")
    path = directory(kind)
    if kind == "byte-level":
        config, texts = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}, ["a<|im_end|> b"]
    else:
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        texts = ["a</s>the", "<s>the the"]
    # transformers turns a SentencePiece model into its own form, which puts no space before a text that begins with
    # one; SentencePiece does, so such a text is left out.
    if kind == "sentencepiece-llama":
        config |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
    else:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        size = load_tokenizer(path).vocab_size
        config["added_tokens_decoder"] = {
            str(size): {"content": "<|turn|>", "special": True},
            str(size + 1): {"content": "<tool>", "lstrip": True, "special": False, "normalized": False},
        }
        texts += ["a <|turn|> b", "a <tool><|turn|>", "the<tool>the"]
    ours = configure(path, **config)
    theirs = transformers.AutoTokenizer.from_pretrained(str(path))
    for text in ("the cache", "two  spaces", "naïve 😀\n\tthe end", *texts):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_text_that_begins_with_the_bos_that_is_added_is_warned_of():
    tokenizer = load_tokenizer("ksana-tiny")
    with pytest.warns(UserWarning, match="adds '<s>' to a text that begins with it"):
        assert tokenizer.encode("<s>a")[:2] == [1, 1]
    assert tokenizer.encode("<s>a", add_special_tokens=False)[:2] != [1, 1] == tokenizer.encode("a")[:1] * 2
