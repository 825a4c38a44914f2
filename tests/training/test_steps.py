"""Checkpoints that survive: saved whole, read back the same, torn ones skipped, other trees refused."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.steps import latest_step, restore_tree, save_checkpoint
from ksana_jax.loading import LoadError, abstract_params
from ksana_jax.models.params import init_params
from tests.loading.models_on_disk import TINY

PARAMS = init_params(TINY, seed=1)
ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def restored(path, config=TINY, dtype="f32", step=None):
    return restore_tree(path, abstract_params(config, dtype), step)[0]


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("tie", [False, True])
def test_weights_come_back_as_they_were_saved(tmp_path, tie):
    config = dataclasses.replace(TINY, tie_embeddings=tie, qkv_bias=True)
    params = init_params(config, seed=2)
    assert save_checkpoint(tmp_path, params) == 0
    found = restored(tmp_path, config)
    assert_same(found, params)
    assert (found.head is None) == tie


def test_weights_are_converted_to_the_wanted_dtype(tmp_path):
    save_checkpoint(tmp_path, PARAMS)
    assert_same(restored(tmp_path, TINY, "bf16"), jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS))


def test_steps_count_on_and_only_the_newest_are_kept(tmp_path):
    assert latest_step(tmp_path) is None
    for step in range(4):
        assert save_checkpoint(tmp_path, jax.tree.map(lambda x, s=step: x + s, PARAMS), keep=2) == step
    assert latest_step(tmp_path) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    assert_same(restored(tmp_path, step=2), jax.tree.map(lambda x: x + 2, PARAMS))


def test_saving_a_step_again_replaces_it(tmp_path):
    save_checkpoint(tmp_path, PARAMS, step=10)
    save_checkpoint(tmp_path, jax.tree.map(jnp.zeros_like, PARAMS), step=10)
    assert_same(restored(tmp_path), jax.tree.map(jnp.zeros_like, PARAMS))


def test_training_state_of_any_form_is_saved_and_restored(tmp_path):
    state = {"params": PARAMS, "moments": (jnp.ones(3), jnp.zeros((2, 2))), "count": jnp.int32(7)}
    save_checkpoint(tmp_path, state, step=5)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    found, step = restore_tree(tmp_path, wanted)
    assert step == 5
    assert_same(found, state)


def test_unfinished_directory_is_never_read_and_removed_by_the_next_save(tmp_path):
    save_checkpoint(tmp_path, PARAMS, step=1)
    unfinished = tmp_path / "step_00000002.orbax-checkpoint-tmp-17"
    shutil.copytree(tmp_path / "step_00000001", unfinished)
    assert latest_step(tmp_path) == 1
    assert_same(restored(tmp_path), PARAMS)
    save_checkpoint(tmp_path, PARAMS, step=2)
    assert not unfinished.exists()


def tear(step, how):
    if how == "empty":
        shutil.rmtree(step)
        step.mkdir()
    elif how == "no metadata":
        (step / "_METADATA").unlink()
    elif how == "no manifest":
        (step / "manifest.ocdbt").unlink()
    elif how == "no list of files":
        (step / "files.json").unlink()
    elif how == "list cut short":
        os.truncate(step / "files.json", 9)
    else:
        data = max(step.rglob("d/*"), key=lambda path: path.stat().st_size)
        os.truncate(data, data.stat().st_size - 1)


@pytest.mark.parametrize(
    "how", ["empty", "no metadata", "no manifest", "no list of files", "list cut short", "data cut short"]
)
def test_torn_step_is_skipped_with_a_warning(tmp_path, how):
    save_checkpoint(tmp_path, PARAMS, step=1)
    save_checkpoint(tmp_path, jax.tree.map(lambda x: x + 1, PARAMS), step=2)
    tear(tmp_path / "step_00000002", how)
    with pytest.warns(UserWarning, match="step_00000002 .*; step 1 is used instead"):
        assert_same(restored(tmp_path), PARAMS)
    with pytest.raises(LoadError, match="no complete checkpoint: step_00000002"):
        restored(tmp_path, step=2)
    # Resuming from step 1 reaches step 2 again, and takes its place.
    save_checkpoint(tmp_path, PARAMS, step=2)
    assert_same(restored(tmp_path), PARAMS)


RESUMER = """
import sys, warnings
from tests.training.test_steps import restored
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(float(restored(sys.argv[1]).final_norm[0]))
print([str(w.message) for w in caught if "is used instead" in str(w.message)])
"""


def test_step_with_altered_bytes_is_skipped(tmp_path):
    # In a process of its own: orbax leaves reads running in the background when one of them fails.
    save_checkpoint(tmp_path, PARAMS, step=1)
    save_checkpoint(tmp_path, jax.tree.map(lambda x: x + 1, PARAMS), step=2)
    for path in (tmp_path / "step_00000002").rglob("d/*"):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] + b"\xff" * 8 + content[len(content) // 2 + 8 :])
    done = subprocess.run(
        [sys.executable, "-c", RESUMER, tmp_path], capture_output=True, text=True, env=ENV, check=False
    )
    assert done.stdout.splitlines()[0] == "1.0", done.stderr
    assert "step_00000002 cannot be read: " in done.stdout


def test_missing_checkpoint(tmp_path):
    with pytest.raises(LoadError, match="nothing holds no complete checkpoint"):
        restored(tmp_path / "nothing", TINY)
    assert not (tmp_path / "nothing").exists()


def test_differing_trees_list_the_first_20_paths(tmp_path):
    save_checkpoint(tmp_path, PARAMS)
    with pytest.raises(LoadError) as refusal:
        restored(tmp_path, dataclasses.replace(TINY, vocab_size=30, tie_embeddings=True, qkv_bias=True))
    message = str(refusal.value)
    assert "\n" not in message and "8 arrays differ" in message
    assert "embed has shape [32, 16], not [30, 16]" in message
    assert "head is not part of the model" in message
    assert "layers.1.b_q is missing" in message
    with pytest.raises(LoadError, match=r"36 arrays differ: .*; and 16 more$") as refusal:
        restored(tmp_path, dataclasses.replace(TINY, num_layers=6))
    assert str(refusal.value).count("is missing") == 20


WRITER = """
import jax, sys
from experiments.training.steps import save_checkpoint
from ksana_jax.models.params import init_params
from tests.loading.models_on_disk import TINY
params = init_params(TINY, seed=1)
for step in range(1, 10_000):
    save_checkpoint(sys.argv[1], jax.tree.map(lambda x: x + step, params), step=step, keep=3)
    print(step, flush=True)
"""


def test_killed_writer_leaves_a_step_that_can_be_read(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True, env=ENV
    ) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            assert writer.stdout.readline()
        time.sleep(0.02)  # into the middle of a save
        writer.send_signal(signal.SIGKILL)
        done = 3 + len(writer.stdout.read().split())
    step = latest_step(tmp_path)
    assert step is not None and step in (done, done + 1)  # the last may have been complete but not announced
    assert_same(restored(tmp_path), jax.tree.map(lambda x: x + step, PARAMS))
