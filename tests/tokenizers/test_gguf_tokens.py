"""Tokenizers of directories, described as in GGUF files, give the ids that they gave before."""

import json
import shutil

import pytest

from ksana_jax.core.sources import model_path
from ksana_jax.tokenizers import TokenizerError, load_tokenizer
from ksana_jax.tokenizers.gguf_splits import SPLITS
from ksana_jax.tokenizers.gguf_tokenizer import gguf_tokenizer
from ksana_jax.tokenizers.gguf_tokens import gguf_tokens
from tests.tokenizers.test_gguf_tokenizer import STRINGS, make

TINY = model_path("ksana-tiny")
DIFFERENT = {split: name for name, split in SPLITS.items()}.values()


def folder_of(tokenizer, path, **changes):
    """A directory with the tokenizer.json of a GGUF file's tokenizer."""
    (path / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer._tokenizer.to_str()) | changes))
    names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "chat_template": "{{ messages }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return path


def read_again(path, vocab_size, bos_id, eos_ids):
    return gguf_tokenizer(gguf_tokens(path, vocab_size, bos_id, eos_ids), "made.gguf")


@pytest.mark.parametrize("name", DIFFERENT)
def test_byte_level_tokenizers_get_the_name_of_a_split_with_their_ids(name, tmp_path):
    given = make(name)
    folder = folder_of(given, tmp_path)
    found = read_again(folder, given.vocab_size + 2, given.bos_id, given.eos_ids)
    assert [text for text in STRINGS if found.encode(text) != given.encode(text)] == []
    assert (found.bos_id, found.eos_ids) == (given.bos_id, given.eos_ids)
    assert found.chat_template == "{{ messages }}" and found.vocab_size == given.vocab_size + 2
    assert [found.piece(i) for i in given.added_ids] == [given.piece(i) for i in given.added_ids]


NAMED = {
    "none by the config": ("<|im_end|>", (), [588]),
    "none by the tokenizer": (None, (5, 590), [5, 590]),
    "the same": ("<|im_end|>", (588,), [588]),
    "others": ("<|im_end|>", (2, 3), [588, 2, 3]),
    "all three and one by its text": ("!", (2, 588, 3), [0, 2, 3, 588]),
    "one beyond the embedding": ("<|far|>", (5,), [5]),
}


@pytest.mark.parametrize("case", NAMED)
def test_every_id_that_ends_a_text_is_kept_the_tokenizers_first(case, tmp_path):
    eos_token, eos_ids, ends = NAMED[case]
    given = make("gpt-2")
    folder = folder_of(given, tmp_path)
    names = {"bos_token": given.bos_token, "eos_token": eos_token}
    names |= {"pad_token": "<think>", "image_token": "<think>", "sep_token": "none such"}  # GGUF has keys for some
    names["added_tokens_decoder"] = {str(given.vocab_size): {"content": "<|far|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    found = read_again(folder, given.vocab_size, None, eos_ids)
    assert list(found.eos_ids) == ends + [588] * (588 not in ends)
    assert (found.bos_id, found.eos_id) == (given.bos_id, ends[0])
    assert found.named_tokens == {"pad_token": "<think>"}


def test_ends_that_have_no_key_are_refused_by_name(tmp_path):
    folder = folder_of(make("gpt-2"), tmp_path)
    with pytest.raises(TokenizerError, match=r"cannot say that 5 '&', 9 '\*' ends a text besides 3 others"):
        gguf_tokens(folder, 600, None, (2, 3, 5, 9))


@pytest.mark.parametrize("adds", [(), ("bos",), ("eos",), ("bos", "eos")])
def test_one_token_as_bos_and_eos_is_added_where_it_was(adds, tmp_path):
    given = make("gpt-2", bos_token_id=588, **{f"add_{name}_token": name in adds for name in ("bos", "eos")})
    found = read_again(folder_of(given, tmp_path), 600, 588, (588,))
    assert given.encode("a b") == found.encode("a b") and found.encode("") == [588] * len(adds)


def test_sentencepiece_models_keep_scores_types_and_spaces(tmp_path):
    given, metadata = load_tokenizer(TINY), gguf_tokens(TINY, 1026, 1, (2,))
    found = gguf_tokenizer(metadata, "made.gguf")
    assert [text for text in STRINGS if found.encode(text) != given.encode(text)] == []
    assert metadata["tokenizer.ggml.tokens"][-2:] == ["[PAD1024]", "[PAD1025]"]
    assert len(metadata["tokenizer.ggml.scores"]) == len(metadata["tokenizer.ggml.token_type"]) == 1026


def test_tokenizers_without_a_name_in_gguf_are_refused(tmp_path):
    given = make("gpt-2")
    pre = {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated"}]}
    pre["pretokenizers"][0]["invert"] = False
    pre["pretokenizers"].append(
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    )
    with pytest.raises(TokenizerError, match="texts would get other ids; give a GGUF file"):
        gguf_tokens(folder_of(given, tmp_path, pre_tokenizer=pre), given.vocab_size, None, ())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    with pytest.raises(TokenizerError, match="no byte-level BPE; others need tokenizer"):
        gguf_tokens(tmp_path, 1024, 1, (2,))
