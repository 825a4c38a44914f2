"""A run resumes only with its first configuration; its counts survive beyond 2^31."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from experiments.training import checkpoints, loop, train
from experiments.training.__main__ import main
from experiments.training.checkpoints import Progress
from experiments.training.optimizer import init_state
from experiments.training.resume import MAY_CHANGE, fixed_fields
from experiments.training.settings import TrainConfig, load_config
from experiments.training.start import first_params
from experiments.training.steps import latest_step, save_checkpoint
from ksana_jax.core.config import ConfigError


@pytest.fixture
def out(finished, tmp_path):
    """A copy of a finished run's out_dir."""
    return shutil.copytree(finished, tmp_path / "out")


def refusal(tiny_config, out, *overrides):
    before = (out / "tokens.npz").read_bytes(), latest_step(out / "checkpoints")
    with pytest.raises(ConfigError) as caught:
        train(str(tiny_config), [f"out_dir={out}", "num_steps=25", *overrides])
    assert "\n" not in str(caught.value)
    assert before == ((out / "tokens.npz").read_bytes(), latest_step(out / "checkpoints"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learning_rate=0.1", "checkpoints was made with learning_rate 0.003 (now 0.1): resume with those values"),
        ("batch_size=2", "batch_size 4 (now 2)"),
        ("model.d_ff=96", "model.d_ff 64 (now 96)"),
        ("compute_dtype=f32", "compute_dtype 'bf16' (now 'f32')"),
        ("seed=1", "tokens.npz was made with seed 0 (now 1)"),
        ("vocab_size=500", "vocab_size 384 (now 500)"),
        ("tokenizer_sample_bytes=5000", "tokenizer_sample_bytes 6000000 (now 5000)"),
        ("corpus_dir=/nonexistent", "corpus_dir /nonexistent is not a folder"),
    ],
)
def test_another_configuration_is_refused_and_what_differs_is_named(tiny_config, out, override, said):
    assert said in refusal(tiny_config, out, override)


def test_all_that_differs_is_named_at_once(tiny_config, out):
    message = refusal(tiny_config, out, "beta1=0.8", "clip_norm=2.0")
    assert "beta1 0.9 (now 0.8)" in message and "clip_norm 1.0 (now 2.0)" in message


def test_another_corpus_is_refused(tiny_config, out, corpus_dir, tmp_path):
    moved = shutil.copytree(corpus_dir, tmp_path / "moved")
    train(str(tiny_config), [f"out_dir={out}", f"corpus_dir={moved}"])  # the same files at another place
    next(moved.glob("f*.py")).write_text("another text")
    assert "tokens.npz was made with corpus '" in refusal(tiny_config, out, f"corpus_dir={moved}")


def test_a_tokenizer_of_a_run_without_checkpoints_is_not_taken_for_another(tiny_config, out):
    shutil.rmtree(out / "checkpoints")
    assert "vocab_size 384 (now 320)" in refusal(tiny_config, out, "vocab_size=320")


def test_what_says_when_a_run_ends_may_change(tiny_config, out):
    train(
        str(tiny_config), [f"out_dir={out}", "num_steps=25", "budget_s=1000", "eval_sequences=4", "keep_checkpoints=1"]
    )
    assert latest_step(out / "checkpoints") == 25


def test_each_field_is_either_fixed_or_named_as_one_that_may_change():
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    assert names >= MAY_CHANGE
    assert {name.partition(".")[0] for name in fixed_fields(TrainConfig())} == names - MAY_CHANGE


def test_tokens_that_cannot_be_read_are_one_line(tiny_config, out):
    content = (out / "tokens.npz").read_bytes()
    for damaged in (content[:-100], b"PK\x03\x04 no archive", b"", b"text"):
        (out / "tokens.npz").write_bytes(damaged)
        assert "tokens.npz cannot be read; remove it to have it created again" in refusal(tiny_config, out)
    (out / "tokens.npz").write_bytes(content)


@pytest.mark.parametrize("tokens", [2**31 - 1, 2**31, 2**40 + 7])
def test_counts_of_tokens_beyond_32_bits_are_saved(tmp_path, tiny_config, tokens):
    config = load_config(tiny_config, [f"out_dir={tmp_path}"])
    state = init_state(config, first_params(config))
    checkpoints.save(tmp_path, state, Progress(5, tokens, 2.5), 3, fixed_fields(config))
    found = checkpoints.restore(tmp_path, state, fixed_fields(config))
    assert found is not None
    restored, progress = found
    assert progress == Progress(5, tokens, 2.5)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_counts_that_were_saved_in_32_bits_are_read(tmp_path, tiny_config):
    config = load_config(tiny_config, [f"out_dir={tmp_path}"])
    state = init_state(config, first_params(config))
    save_checkpoint(tmp_path, {"state": state, "tokens": np.int32(77), "elapsed_s": np.float32(2.5)}, step=5)
    found = checkpoints.restore(tmp_path, state, fixed_fields(config))
    assert found is not None and found[1] == Progress(5, 77, 2.5)


def test_a_vocabulary_that_the_corpus_cannot_fill_is_one_line(tiny_config, tmp_path):
    with pytest.raises(
        ConfigError, match=r"bytes of training files give no tokenizer with vocab_size 60000: Vocabulary"
    ):
        train(str(tiny_config), [f"out_dir={tmp_path}", "vocab_size=60000"])


def test_a_loss_that_is_not_finite_is_one_line_on_the_command_line(tiny_config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "learning_rate_scale", lambda *args: float("nan"))
    assert main([str(tiny_config), f"out_dir={tmp_path}"]) == 2
    assert "error: loss is nan at step 5; the last checkpoint is of step 0\n" in capsys.readouterr().err
