"""Recall examples among a run's training sequences, and as questions that the run never trains on."""

import json

import numpy as np
import pytest

from experiments.training import train
from experiments.training.batches import IGNORED
from experiments.training.recall_mix import KINDS, RecallMix
from experiments.training.settings import load_config
from experiments.training.sinks import recall_accuracy
from experiments.training.tokenizer import BOS_ID, EOS_ID
from ksana_jax.core.config import ConfigError

FIRST = 3  # id of the first character


def encode(text):
    return [ord(letter) + FIRST for letter in text]


def decode(ids):
    return "".join(chr(i - FIRST) for i in ids)


def make(fraction=0.5, bos=True, seed=0):
    return RecallMix(encode, context=900, bos=bos, fraction=fraction, seed=seed)


def batch(mix, step):
    """The mix's result for 40 sequences of zeros."""
    return mix.mixed(step, np.zeros((40, 900), np.int32), np.zeros((40, 900), np.int32))


def test_a_fraction_of_the_sequences_is_replaced_and_depends_on_seed_and_step_alone():
    mix = make(fraction=0.2)
    replaced = np.concatenate([batch(mix, step)[0].any(axis=1) for step in range(20)])
    assert 0.15 < replaced.mean() < 0.25
    np.testing.assert_array_equal(batch(mix, 3)[0], batch(make(fraction=0.2), 3)[0])
    assert not np.array_equal(batch(mix, 3)[0], batch(mix, 4)[0])
    assert not np.array_equal(batch(mix, 3)[0], batch(make(fraction=0.2, seed=1), 3)[0])


@pytest.mark.parametrize("bos", [True, False])
def test_sequences_hold_whole_examples_and_targets_follow_inputs(bos):
    inputs, targets = batch(make(fraction=1.0, bos=bos), 0)
    assert (inputs[:, 0] == BOS_ID).all() == bos
    scored = targets != IGNORED
    assert not scored[inputs == EOS_ID].any(), "an example does not tell what the next one is"
    np.testing.assert_array_equal(targets[:, :-1][scored[:, :-1]], inputs[:, 1:][scored[:, :-1]])
    assert scored.mean() > 0.6
    for row in inputs[:, int(bos) :]:
        first = decode(row[: np.flatnonzero(row == EOS_ID)[0]])
        assert first.endswith("'\n") and len(first.splitlines()) > 1


def test_questions_score_their_answers_only_and_are_not_trained_on():
    mix = make(fraction=1.0)
    held_out = mix.held_out(4)
    assert held_out.keys() == KINDS.keys()
    seen = "".join(decode(row[row > 2]) for step in range(5) for row in batch(mix, step)[0])
    for kind, (inputs, targets) in held_out.items():
        for row, target in zip(inputs, targets, strict=True):
            places = np.flatnonzero(target != IGNORED)
            np.testing.assert_array_equal(target[places], row[places + 1])
            question = decode(row[1 : places[0] + 1]).splitlines()[-1]
            assert question.endswith("'"), kind
            assert question + decode(target[places]) not in seen or kind == "stream_eval"


def test_kinds_that_do_not_fit_half_a_context_are_refused():
    with pytest.raises(ConfigError, match=r"examples have at least .* tokens, num_tokens is 32"):
        RecallMix(encode, context=64, bos=True, fraction=0.1, seed=0)


def test_fractions_beyond_one_are_refused(tiny_config):
    with pytest.raises(ConfigError, match=r"recall_fraction is 1\.5"):
        load_config(tiny_config, ["out_dir=x", "recall_fraction=1.5"])


def test_accuracy_counts_questions_whose_whole_answer_is_the_most_likely(monkeypatch):
    import jax.numpy as jnp

    from experiments.training import sinks

    # A model that always predicts its own input.
    monkeypatch.setattr(sinks, "dense_logits", lambda params, inputs, *, config: jnp.eye(9)[inputs])
    inputs = np.array([[4, 5, 6], [4, 5, 6]], np.int32)
    targets = np.array([[IGNORED, 5, 6], [IGNORED, 5, 7]], np.int32)
    assert recall_accuracy(None, {"needle": (inputs, targets)}, config=None) == {"needle": 0.5}


@pytest.mark.soak
def test_a_run_with_recall_logs_its_accuracy_and_says_so_on_its_card(tmp_path, tiny_config):
    overrides = [f"out_dir={tmp_path}", "context=320", "recall_fraction=0.5", "num_steps=10", "batch_size=2"]
    train(str(tiny_config), [*overrides, "eval_sequences=2"])
    last = json.loads((tmp_path / "train_log.jsonl").read_text().splitlines()[-1])
    assert last["recall_accuracy"] == dict.fromkeys(KINDS, 0.0)
    card = " ".join((tmp_path / "export" / "MODEL_CARD.md").read_text().split())
    assert "50% of the sequences are generated recall examples instead" in card
