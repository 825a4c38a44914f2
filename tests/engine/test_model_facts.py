"""`ksana doctor MODEL`: facts that decide a model's answers, with their files."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ksana_jax.core.gguf_file import gguf_of
from ksana_jax.engine.model_facts import ending_files, model_facts
from ksana_jax.engine.request_factory import ending_ids
from ksana_jax.loading import export_hf, load_config
from ksana_jax.models.params import init_params
from ksana_jax.tokenizers import find_tokenizer
from tests.gguf_writer import write_gguf
from tests.loading.gguf_on_disk import gguf_metadata, gguf_tensors
from tests.loading.models_on_disk import TINY, random_tensors, write_model
from tests.tokenizers.conftest import CHAT, llama_like

GOLDEN = Path(__file__).parents[1] / "golden"
SIZE = llama_like().get_vocab_size()


@pytest.fixture
def folder(tmp_path):
    """A model of whose files each names another end, with one added token that its embedding has no row for."""
    config = dataclasses.replace(TINY, vocab_size=SIZE + 1, eos_ids=(2, 5))
    write_model(tmp_path, random_tensors(config), config)
    llama_like().save(str(tmp_path / "tokenizer.json"))
    added = {str(SIZE): {"content": "<turn>", "special": True}, str(SIZE + 1): {"content": "<pic>", "special": True}}
    values = {"added_tokens_decoder": added, "eos_token": "<turn>", "bos_token": "<s>", "chat_template": CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2, -1]}')
    return tmp_path


def found(model, name):
    return [(fact.value, fact.source) for fact in model_facts(model) if fact.name == name]


def test_each_end_of_a_text_is_shown_with_the_files_that_name_it(folder):
    assert found(folder, "ends a text") == [
        ("7 '\\x04'", "generation_config.json"),
        ("2 '</s>'", "generation_config.json, config.json"),
        ("5 '\\x02'", "config.json"),
        (f"{SIZE} '<turn>'", "tokenizer_config.json"),
    ]


def test_scales_and_caps_of_scores_are_shown_where_a_model_has_them():
    assert found(GOLDEN / "gemma2-gqa-window-tied", "scores") == [
        ("attention scale 0.204124 instead of 0.25, soft cap 3 of attention, soft cap 12 of logits", "config.json")
    ]
    assert found(GOLDEN / "llama-mha", "scores") == []


def ends(path):
    config, tokenizer = load_config(path), find_tokenizer(path)
    shown = ending_files(path, config, tokenizer)
    assert tuple(i for i in shown if i < config.vocab_size) == ending_ids(config, tokenizer)
    return shown


def test_the_ends_that_are_shown_are_those_that_an_engine_uses(folder):
    assert list(ends(folder)) == [7, 2, 5, SIZE]
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert ends(folder)[2] == ["generation_config.json", "config.json", "special_tokens_map.json"]
    (folder / "generation_config.json").write_text("")
    (folder / "special_tokens_map.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    del values["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(values))
    assert ends(folder) == {2: ["default of llama"]}


def test_a_gguf_file_names_the_key_of_each_end(tmp_path):
    config = dataclasses.replace(TINY, eos_ids=(2, 5, 9))
    path = tmp_path / "m.gguf"
    write_gguf(path, gguf_metadata("llama", config), gguf_tensors("llama", config, random_tensors(config)))
    assert gguf_of(path) == path
    values = {"tokenizer.ggml.eot_token_id": 2**32 - 1, "tokenizer.ggml.eom_token_id": np.int32(-1)}
    other = tmp_path / "other.gguf"
    write_gguf(other, gguf_metadata("llama", config) | values, gguf_tensors("llama", config, random_tensors(config)))
    assert list(ending_files(other, load_config(other), None)) == [2]
    keys = {2: "eos_token_id", 5: "eot_token_id", 9: "eom_token_id"}
    assert ending_files(path, load_config(path), None) == {
        index: [f"m.gguf: tokenizer.ggml.{key}"] for index, key in keys.items()
    }


def test_a_gguf_file_says_which_tokens_end_a_text_by_their_text(tmp_path):
    tokens = ["a", "<|end|>", "b", "<|im_end|>", *"cdefgh"]
    tokens += map(str, range(TINY.vocab_size - len(tokens)))
    keys = {"tokens": tokens, "eos_token_id": 2, "fim_pad_token_id": 7}
    metadata = gguf_metadata("llama", TINY) | {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = tmp_path / "m.gguf"
    write_gguf(path, metadata, gguf_tensors("llama", TINY, random_tensors(TINY)))
    expected = {2: "tokenizer.ggml.eos_token_id", 7: "tokenizer.ggml.fim_pad_token_id", 1: "its text", 3: "its text"}
    ends = ending_files(path, load_config(path), None)
    assert ends == {index: [f"m.gguf: {said}"] for index, said in expected.items()}
    assert set(load_config(path).eos_ids) == expected.keys()


def test_a_tokenizer_is_shown_with_what_it_adds_and_what_is_refused(folder):
    [(said, source)] = found(folder, "tokenizer")
    assert said.startswith(f"{SIZE + 2} ids; prompts with one of the last 1 are refused") and source == "tokenizer.json"
    assert found(folder, "added to a prompt") == [("nothing", "tokenizer.json")]
    [(said, _)] = found(folder, "added tokens")
    lacks = "which the embedding has no row for: never drawn"
    assert said == f"5: 0 '<unk>', 1 '<s>', 2 '</s>', {SIZE} '<turn>', {SIZE + 1} '<pic>', {lacks}"


def test_a_template_is_shown_at_work_or_why_it_does_not(folder):
    [(said, source)] = found(folder, "chat template")
    assert "'hi' becomes '<s><|im_start|>user\\nhi" in said and source == "tokenizer_config.json"
    for data, why in (
        (b"\xff", "is not UTF-8"),
        (b"{% if %}", "8 characters; of a first message: chat template refused"),
    ):
        (folder / "chat_template.jinja").write_bytes(data)
        [(said, source)] = found(folder, "chat template")
        assert why in said and source == "chat_template.jinja"


def test_ropes_and_windows_are_shown_with_their_layers():
    model = GOLDEN / "gemma3-mqa-window-rope-linear-new"
    linear, plain = "linear, theta 10,000, factor 4.0 in layers 0, 2", "default, theta 100 in layers 1"
    assert found(model, "rope") == [(linear, "config.json"), (plain, "config.json")]
    [(dynamic, _)] = found(GOLDEN / "llama-rope-dynamic", "rope")
    assert dynamic.endswith("factor 4.0, original_max_len 64, of max_model_len in all texts, if that is more")
    [(nope, _)] = found(GOLDEN / "smollm3-gqa-nope-tied", "rope")[1:]
    assert nope == "none in layers 1"
    [(longrope, _)] = found(GOLDEN / "phi3-gqa-window-rope-long", "rope")
    assert longrope.endswith("partial_rotary_factor 0.75, short_factors only if max_model_len is no more")
    [(scores, _)] = found(GOLDEN / "granite-gqa", "scores")
    assert scores.endswith("scale 0.4 of residuals, scale 0.5 of logits")
    assert not found(GOLDEN / "granite-gqa", "shared keys and values")
    [(experts, _)] = found(GOLDEN / "qwen2_moe-gqa-experts-biases", "experts")
    assert experts == "2 of 6 for each token and a shared MLP" and not found(model, "experts")
    assert found(model, "attention") == [
        ("full in layers 0, 2", "config.json"),
        ("window=12 in layers 1", "config.json"),
    ]
    assert found(model, "ends a text") == [("nothing: answers continue to max_tokens", "no file")]
    assert found(model, "tokenizer") == [("none: prompts are token ids", "no file")]


def test_layers_that_read_another_layers_keys_and_values_are_named(tmp_path):
    config = dataclasses.replace(TINY, family="llama_cla", kv_layers=(0,) * TINY.num_layers)
    export_hf(tmp_path, config, init_params(config))
    assert found(tmp_path, "shared keys and values") == [("layer 1 reads layer 0", "config.json")]


def test_dtypes_are_those_of_the_files_and_of_the_settings(folder):
    [(stored, _)] = found(folder, "weights in files")
    assert stored.startswith("tensors: ") and stored.endswith("in F32")
    assert found(folder, "weights in memory") == [("f32; with dtype: auto f32, on this device", "default of dtype")]
    (folder / "model.safetensors").unlink()
    [(stored, _)] = found(folder, "weights in files")
    assert "safetensors" in stored  # says what is missing; the rest is shown all the same
