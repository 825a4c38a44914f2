"""Training files, held-out files, and the sequences made from text."""

import numpy as np
import pytest

from experiments.training.batches import IGNORED, Batches, TokenFiles
from experiments.training.tokenizer import load_tokenizer, train_tokenizer
from ksana_jax.lab.runs import stdlib_corpus as corpus


@pytest.fixture(scope="module")
def stdlib():
    return corpus.source_texts()


@pytest.fixture(scope="module")
def tokenizer(stdlib, tmp_path_factory):
    texts = [text for name, text in stdlib if name.startswith(("json/", "email/"))]
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    path.write_bytes(train_tokenizer(texts, vocab_size=512, sample_bytes=300_000, seed=0))
    return load_tokenizer(path)


def test_standard_library_has_sources_but_nothing_installed_beside_it(stdlib):
    names = [name for name, _ in stdlib]
    assert "json/decoder.py" in names
    assert not [name for name in names if "site-packages" in name or "_sysconfigdata" in name]
    assert names == sorted(names)


def test_held_out_files_and_their_copies_are_not_trained_on(stdlib, corpus_dir):
    train, held_out = corpus.split_texts(stdlib)
    assert 0.01 < len(held_out) / len(stdlib) < 0.04
    assert not {name for name, _ in train} & {name for name, _ in held_out}
    assert not {text for _, text in train} & {text for _, text in held_out}

    texts = corpus.source_texts(corpus_dir)
    train, held_out = corpus.split_texts(texts)
    assert len(held_out) == 2
    assert len(train) == len(texts) - 3, "the copy of a held-out file is dropped too"


def test_a_file_is_held_out_by_its_name_alone(stdlib):
    train, held_out = corpus.split_texts([(name, text[::-1]) for name, text in stdlib])
    assert {name for name, _ in held_out} <= {name for name, _ in stdlib if corpus.is_held_out(name)}
    assert not [name for name, _ in train if corpus.is_held_out(name)]
    assert corpus.is_held_out("ast.py"), "this name, in every Python version"


def test_experiments_get_several_long_held_out_texts():
    texts = corpus.heldout_texts(min_chars=10_000)
    assert len(texts) >= 5
    assert all(len(text) >= 10_000 and corpus.is_held_out(name) for name, text in texts)


def test_training_batches_hold_no_held_out_text(finished, corpus_dir):
    tokenizer = load_tokenizer(finished / "tokenizer.model")
    with np.load(finished / "tokens.npz") as arrays:
        files = TokenFiles(arrays["train"], arrays["train_starts"])
    batches = Batches(files, context=64, batch_size=4, seed=0, bos=True)
    seen = set()
    for step in range(3 * batches.steps_per_epoch):
        _, targets = batches[step]
        seen |= {bytes(row[row != IGNORED][:24].astype(np.uint16)) for row in targets}
    held_out = [text for name, text in corpus.source_texts(corpus_dir) if corpus.is_held_out(name)]
    train = [text for name, text in corpus.source_texts(corpus_dir) if not corpus.is_held_out(name)]

    def begins(text):  # every file's first piece of an epoch begins where the file does
        return bytes(np.asarray(tokenizer.encode(text)[:24], np.uint16))

    assert not [text for text in held_out if begins(text) in seen]
    assert [text for text in train if begins(text) in seen]


def test_every_source_file_survives_the_tokenizer(stdlib, tokenizer):
    for name, text in stdlib[::40]:
        assert tokenizer.decode(tokenizer.encode(text)) == text, name


ODD = ("", " ", "\n\n", "\t\tx", "  x  ", "a\r\nb", "\u00e9\u4e16\U0001f40d", "\x00\x7f", "    return  None \n    \n")


@pytest.mark.parametrize("text", ODD)
def test_odd_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sequences_begin_with_bos_and_stay_within_a_file():
    files = TokenFiles.encode(["abcdefghij", "xyz"], lambda text: [ord(letter) for letter in text])
    pieces = files.pieces(4)
    assert pieces.tolist() == [[0, 4], [4, 8], [8, 11], [11, 15]]
    inputs, targets = files.sequences(pieces, 4, bos=True)
    assert inputs[0].tolist() == [1, ord("a"), ord("b"), ord("c")]
    assert targets[0].tolist() == [ord(letter) for letter in "abcd"]
    assert inputs[2].tolist() == [1, ord("i"), ord("j"), 2], "what follows the end of the file is not scored"
    assert targets[2].tolist() == [ord("i"), ord("j"), 2, IGNORED]
    assert (inputs[:, 0] == 1).all()

    shifted = files.pieces(4, shift=3)
    assert shifted.tolist() == [[0, 3], [3, 7], [7, 11], [11, 14], [14, 15]]


def test_without_bos_sequences_are_pieces_and_each_token_but_a_files_first_is_a_target():
    files = TokenFiles.encode(["abcdefghij", "xyz"], lambda text: [ord(letter) for letter in text])
    inputs, targets = files.sequences(files.pieces(4), 4, bos=False)
    a, x = ord("a"), ord("x")
    assert inputs[:3].tolist() == [[a, a + 1, a + 2, a + 3], [a + 4, a + 5, a + 6, a + 7], [a + 8, a + 9, 2, 2]]
    assert targets[1].tolist() == [a + 5, a + 6, a + 7, a + 8], "the last target is the next piece's first token"
    assert targets[2].tolist() == [a + 9, 2, IGNORED, IGNORED], "nothing follows the end of a file"
    assert inputs[3].tolist() == [x, x + 1, x + 2, 2]
    assert targets[3].tolist() == [x + 1, x + 2, 2, IGNORED]


def test_an_epoch_shows_every_token_once_and_epochs_differ():
    text = "".join(chr(300 + i) for i in range(1000))
    files = TokenFiles.encode([text], lambda text: [ord(letter) for letter in text])
    batches = Batches(files, context=10, batch_size=7, seed=3, bos=True)
    epochs = []
    for epoch in range(2):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        epochs.append([batches[step][1] for step in steps])
        tokens = np.concatenate([targets[targets != IGNORED] for targets in epochs[-1]])
        assert len(tokens) == len(set(tokens.tolist()))
        assert len(tokens) > 0.9 * len(files.tokens)
    assert not all(np.array_equal(a, b) for a, b in zip(*epochs, strict=True))
    again = Batches(files, context=10, batch_size=7, seed=3, bos=True)
    np.testing.assert_array_equal(again[batches.steps_per_epoch][1], epochs[1][0])
