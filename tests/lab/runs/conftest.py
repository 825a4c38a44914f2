"""A model directory without weights, a task without an engine, and an engine without a model."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import fake_llm
import fake_task

from ksana_jax.core import own_code
from ksana_jax.core.sources import model_path
from ksana_jax.lab.runs import run as run_module
from ksana_jax.lab.runs import trials
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.tasks import TASKS


@pytest.fixture
def model(tmp_path):
    """Path of a model whose training context is 16 tokens."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 16}))
    return str(folder)


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory):
    """Path of the embedded model cut to one narrow layer, for load_format "dummy"."""
    folder = tmp_path_factory.mktemp("model")
    for path in model_path("ksana-tiny").glob("tokenizer*"):
        shutil.copy(path, folder)
    config = json.loads((model_path("ksana-tiny") / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture
def text(tmp_path):
    """Path of a text of 400 bytes."""
    path = tmp_path / "text.txt"
    path.write_text("0123456789" * 40)
    return str(path)


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
    """Trials of fakes need not ask jax what the device is."""
    for module in (run_module, trials):
        monkeypatch.setattr(module, "environment", lambda: {"device": "none"})


@pytest.fixture
def fake(monkeypatch):
    """The task "fake" is known, and its file counts as the package's."""
    monkeypatch.setattr(own_code, "PACKAGES", (*own_code.PACKAGES, "fake_task"))
    monkeypatch.setitem(TASKS, "fake", "fake_task:Fake")
    return fake_task


@pytest.fixture
def make_llm(monkeypatch):
    """The fake engine; its `instances` are those built in this test."""
    monkeypatch.setattr(fake_llm.FakeLLM, "instances", [])
    return fake_llm.FakeLLM


@pytest.fixture
def make_run(model, text, make_llm, tmp_path):
    """Runs a perplexity experiment into a folder of that name."""

    def make(folder, **fields):
        engine = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 1}
        settings = {"texts": [text], "num_texts": 1, "num_tokens": 64, **fields.pop("settings", {})}
        given = {"model": model, "engine": engine, "settings": settings, "seeds": [0, 1], **fields}
        outcome = run_module.run(plan(given), tmp_path / folder, make_llm=make_llm)
        assert not outcome.failed
        return tmp_path / folder

    return make
