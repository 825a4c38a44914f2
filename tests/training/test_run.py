"""A run from YAML to exported model, and what happens to it when it is killed."""

import itertools
import json
import signal
import subprocess
import sys
import types

import numpy as np
import pytest
from safetensors.numpy import load_file

from experiments.training import loop, train
from experiments.training.tokenizer import load_tokenizer as load_spm
from ksana_jax import LLM, SamplingParams
from ksana_jax.core.config import ConfigError
from ksana_jax.loading import LoadError, load_model
from ksana_jax.tokenizers import load_tokenizer
from tests.reference import reference_logprobs
from tests.soak import soak_unless

# Stops like a machine that loses power: after the line of step 15, five steps beyond the only checkpoint.
KILLED = """
import os, signal, sys
from experiments.training import train, resume

write = resume.TrainLog.write

def write_and_die(self, record):
    write(self, record)
    if record["step"] == 15:
        os.kill(os.getpid(), signal.SIGKILL)

resume.TrainLog.write = write_and_die
train(sys.argv[1], sys.argv[2:])
"""


def log_of(out):
    """Records of a run without what the clock decides."""
    records = [json.loads(line) for line in (out / "train_log.jsonl").read_text().splitlines()]
    for record in records:
        del record["tokens_per_s"], record["elapsed_s"]
    return records


def weights_of(out):
    return load_file(out / "export" / "model.safetensors")


def test_run_learns_and_logs(finished):
    records = log_of(finished)
    assert [record["step"] for record in records] == [5, 10, 15, 20]
    assert records[-1]["loss"] < records[0]["loss"] - 0.1
    assert records[-1]["lr"] < records[1]["lr"] / 3, "the rate has decayed"
    assert ["heldout_loss" in record for record in records] == [False, True, False, True]
    assert len(records[-1]["first_token_attention"]) == 2
    assert 0 <= records[-1]["sink_1"] <= 1


@pytest.fixture(scope="module")
def killed(tmp_path_factory, tiny_config):
    """out_dir of a run killed after the log line of step 15; its only checkpoint is of step 10."""
    out = tmp_path_factory.mktemp("killed")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tiny_config), f"out_dir={out}"], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    return out


def test_killed_run_resumes_and_ends_as_if_nothing_had_happened(killed, finished, tiny_config):
    assert [record["step"] for record in log_of(killed)] == [5, 10, 15]
    with open(killed / "train_log.jsonl", "a") as log:
        log.write('{"step": 20, "lo')  # a line that the kill cut short
    assert not (killed / "export").exists()

    train(str(tiny_config), [f"out_dir={killed}"])

    assert log_of(killed) == log_of(finished), "each step once, with the same losses to the last digit"
    expected = weights_of(finished)
    for name, weight in weights_of(killed).items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)


def test_torn_checkpoint_is_skipped_for_the_one_before(tmp_path, finished, tiny_config):
    overrides = [f"out_dir={tmp_path}"]
    train(str(tiny_config), overrides)
    newest = max((tmp_path / "checkpoints").iterdir())
    largest = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])

    with pytest.warns(UserWarning, match="step_00000020 is not complete; step 10 is used instead"):
        train(str(tiny_config), overrides)

    assert newest.name.endswith("20")
    assert log_of(tmp_path) == log_of(finished)


def test_finished_run_only_exports_again(finished, tiny_config):
    before = log_of(finished)
    (finished / "export" / "model.safetensors").unlink()
    train(str(tiny_config), [f"out_dir={finished}"])
    assert log_of(finished) == before
    assert (finished / "export" / "model.safetensors").exists()


def test_run_limited_by_time_ends_decayed_and_saved(tmp_path, tiny_config, monkeypatch):
    ticks = itertools.count()  # a clock that goes on by 0.1 s whenever it is asked
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(monotonic=lambda: next(ticks) / 10))
    overrides = [
        f"out_dir={tmp_path}",
        "num_steps=null",
        "budget_s=10",
        "log_every=1",
        "eval_every=1000",
        "checkpoint_every=null",
        "decay_fraction=0.5",
    ]
    train(str(tiny_config), overrides)
    records = log_of(tmp_path)
    assert len(records) > 10
    assert records[-1]["lr"] < 0.2 * max(record["lr"] for record in records)
    assert "heldout_loss" in records[-1]
    newest = max((tmp_path / "checkpoints").iterdir())
    assert newest.name == f"step_{records[-1]['step']:08d}"


@pytest.mark.parametrize("kind", soak_unless(lambda kind: kind == "learned", ["learned", "zero"]))
def test_model_with_sink_logits_and_no_bos_is_trained_and_exported(tmp_path, tiny_config, kind):
    overrides = [f"out_dir={tmp_path}", f"model.sinks={kind}", "bos=false", "num_steps=10"]
    train(str(tiny_config), overrides)
    assert 0 < min(log_of(tmp_path)[-1]["sink_logit_attention"]) < 0.5
    config, params = load_model(tmp_path / "export")
    assert (config.sinks, config.bos_id) == (kind, None)
    if kind == "learned":
        assert all(np.abs(layer.sink_logits).min() > 0 for layer in params.layers), "each head's logit has moved"
    tokenizer = load_tokenizer(tmp_path / "export")
    assert tokenizer.bos_id is None
    assert tokenizer.encode("x") == load_spm(tmp_path / "tokenizer.model").encode("x")
    card = (tmp_path / "export" / "MODEL_CARD.md").read_text()
    assert "at position 0 of no training sequence" in " ".join(card.split())


def test_run_starts_from_the_weights_and_the_tokenizer_of_another(tmp_path, finished, tiny_config):
    start = [f"out_dir={tmp_path}", f"init_from={finished / 'export'}"]
    train(str(tiny_config), [*start, "learning_rate=1e-9", "num_steps=5", "eval_every=5"])
    for name, weight in weights_of(tmp_path).items():
        np.testing.assert_allclose(weight, weights_of(finished)[name], atol=1e-6, err_msg=name)
    assert log_of(tmp_path)[-1]["heldout_loss"] == pytest.approx(log_of(finished)[-1]["heldout_loss"], abs=1e-3)
    assert (tmp_path / "tokenizer.model").read_bytes() == (finished / "tokenizer.model").read_bytes()
    with pytest.raises(ConfigError, match=r"init_from '.*' \(now None\)"):
        train(str(tiny_config), [f"out_dir={tmp_path}", "num_steps=10"])


def test_a_run_with_fewer_kv_heads_starts_from_the_means_of_those_that_become_one(tmp_path, tiny_config):
    more, fewer = tmp_path / "more", tmp_path / "fewer"
    shape = ["model.num_heads=4", "model.head_dim=8", "num_steps=5", "eval_every=5"]
    train(str(tiny_config), [f"out_dir={more}", "model.num_kv_heads=4", *shape])
    start = [f"init_from={more / 'export'}", "learning_rate=1e-9"]
    train(str(tiny_config), [f"out_dir={fewer}", "model.num_kv_heads=2", *start, *shape])
    before, after = weights_of(more), weights_of(fewer)
    pooled = [name for name in before if "k_proj" in name or "v_proj" in name]
    assert len(pooled) == 4
    for name, weight in before.items():
        wanted = weight.reshape(2, 2, 8, 32).mean(1).reshape(16, 32) if name in pooled else weight
        np.testing.assert_allclose(after[name], wanted, atol=1e-6, err_msg=name)
    with pytest.raises(ConfigError, match=r"d_ff 64, not 80"):
        train(
            str(tiny_config),
            [f"out_dir={tmp_path / 'wider'}", "model.d_ff=80", f"init_from={fewer / 'export'}", *shape],
        )


@pytest.mark.soak
def test_a_run_whose_layers_share_keys_and_values_is_trained_exported_and_served(tmp_path, tiny_config):
    shape = ["model.num_layers=3", "model.cla_share_factor=2", "eval_every=10"]
    train(str(tiny_config), [f"out_dir={tmp_path}", "num_steps=10", *shape])
    train(str(tiny_config), [f"out_dir={tmp_path}", "num_steps=20", *shape])  # resumed
    export = tmp_path / "export"
    config, params = load_model(export)
    assert (config.family, config.kv_layers) == ("llama_cla", (0, 0, 2))
    assert [p.w_k is None and p.w_v is None for p in params.layers] == [False, True, False]
    losses = [record["heldout_loss"] for record in log_of(tmp_path) if "heldout_loss" in record]
    assert losses[-1] < losses[0]
    card = " ".join((export / "MODEL_CARD.md").read_text().split())
    assert "Each 2 layers share the keys and values of the first of them." in card
    llm = LLM(str(export), num_blocks=32, max_num_seqs=2)
    [output] = llm.generate("import", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    text = np.array([*output.prompt_token_ids, *output.outputs[0].token_ids])
    scores = reference_logprobs(params, config, text)
    assert scores[-6:-1].argmax(-1).tolist() == output.outputs[0].token_ids
    assert llm.kv_bytes_per_token(64) == 2 * 2 * 16 * 4, "two of three layers"
    with pytest.raises(ConfigError, match=r"cla_share_factor 2 \(now 1\)"):
        train(str(tiny_config), [f"out_dir={tmp_path}", "num_steps=20", "model.num_layers=3"])
    with pytest.raises(ConfigError, match=r"has family 'llama_cla', not 'llama'; kv_layers \(0, 0, 2\), not None"):
        train(str(tiny_config), [f"out_dir={tmp_path / 'next'}", f"init_from={export}", "model.num_layers=3"])


def test_a_model_to_start_from_that_does_not_exist_is_named(tmp_path, tiny_config):
    with pytest.raises(LoadError, match="there is no model 'nothere'"):
        train(str(tiny_config), [f"out_dir={tmp_path}", "init_from=nothere"])


def test_another_shape_than_that_of_the_weights_is_refused(tmp_path, finished, tiny_config):
    with pytest.raises(ConfigError, match=r"export has d_ff 64, not 96; num_heads 2, not 4"):
        train(
            str(tiny_config),
            [f"out_dir={tmp_path}", f"init_from={finished / 'export'}", "model.num_heads=4", "model.d_ff=96"],
        )
