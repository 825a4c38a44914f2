import argparse
import inspect

import pytest

from ksana_jax.lab.runs.stdlib_corpus import is_held_out

TINY = """
model: {d_model: 32, num_layers: 2, num_heads: 2, num_kv_heads: 1, head_dim: 16, d_ff: 64}
vocab_size: 384
context: 64
batch_size: 4
num_steps: 20
budget_s: null
warmup_steps: 5
log_every: 5
eval_every: 10
eval_sequences: 8
checkpoint_every: 10
"""


@pytest.fixture(scope="session")
def corpus_dir(tmp_path_factory):
    """The source of argparse in 29 files of 3,000 characters, 2 of them held out, and a copy of a held-out one."""
    directory = tmp_path_factory.mktemp("corpus")
    source = inspect.getsource(argparse)
    texts = [source[begin : begin + 3000] for begin in range(0, 87_000, 3000)]
    named = [(is_held_out(f"f{i}.py"), f"f{i}.py") for i in range(1000)]
    held_out = [name for held, name in named if held][:2]
    train = [name for held, name in named if not held][: len(texts) - 2]
    for name, text in zip(held_out + train, texts, strict=True):
        (directory / name).write_text(text)
    (directory / "copy_of_held_out.py").write_text(texts[0])
    assert not is_held_out("copy_of_held_out.py")
    return directory


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory, corpus_dir):
    """Path of a YAML file for 20 steps of a tiny model; needs out_dir."""
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY + f"corpus_dir: {corpus_dir}\n")
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_config):
    """out_dir of a run that nothing interrupted."""
    from experiments.training import train

    out = tmp_path_factory.mktemp("finished")
    train(str(tiny_config), [f"out_dir={out}"])
    return out
