"""The exported directory is a Llama model that the rest of ksana_jax, and transformers, read."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.training.batches import TokenFiles
from experiments.training.loop import heldout_sequences
from experiments.training.sinks import evaluate
from ksana_jax.loading import load_config, load_model
from ksana_jax.models.dense import dense_logits
from ksana_jax.tokenizers import load_tokenizer

FILES = [
    "MODEL_CARD.md",
    "config.json",
    "generation_config.json",
    "heldout.txt",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "train_log.jsonl",
]
TEXT = "def parse(self, args=None):\n\n    return args  # caf\u00e9 \U0001f40d\n"


def last_record(directory):
    return json.loads((directory / "train_log.jsonl").read_text().splitlines()[-1])


def test_export_has_what_a_model_directory_needs(finished):
    export = finished / "export"
    assert sorted(path.name for path in export.iterdir()) == FILES
    config = json.loads((export / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["max_position_embeddings"] == 64
    assert config["tie_word_embeddings"] is True
    assert load_config(export).num_kv_heads == 1
    card = (export / "MODEL_CARD.md").read_text()
    assert "20 steps of 4 sequences" in card
    assert f"Held-out loss {last_record(export)['heldout_loss']:.3f}" in card


def test_exported_model_has_the_loss_and_sinks_that_the_log_says(finished):
    config, params = load_model(finished / "export")
    with np.load(finished / "tokens.npz") as arrays:
        held = TokenFiles(arrays["held"], arrays["held_starts"])
    measured = evaluate(params, *heldout_sequences(held, 64, 8, bos=True), config=config, batch_size=4)
    assert measured.keys() == {"heldout_loss", "sink_1", "first_token_attention"}
    assert measured.items() <= last_record(finished).items()


def test_both_tokenizer_files_give_the_same_ids(finished, tmp_path):
    export = finished / "export"
    (tmp_path / "tokenizer.model").write_bytes((export / "tokenizer.model").read_bytes())
    from_json, from_model = load_tokenizer(export), load_tokenizer(tmp_path)
    assert type(from_json) is not type(from_model)
    ids = from_json.encode(TEXT)
    assert ids[0] == 1
    assert ids == from_model.encode(TEXT)
    assert from_json.decode(ids) == TEXT


def test_transformers_computes_the_same_logits(finished):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    export = finished / "export"
    ids = load_tokenizer(export).encode(TEXT)
    assert transformers.AutoTokenizer.from_pretrained(export).encode(TEXT) == ids

    model = transformers.LlamaForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    config, params = load_model(export)
    ours = dense_logits(params, jnp.asarray(ids), config=config)
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-4)
