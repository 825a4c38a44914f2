"""Folders and files that are no complete model are told apart, and the error says what to do."""

import json

import numpy as np
import pytest
import safetensors.numpy

from ksana_jax.engine.model_facts import model_facts
from ksana_jax.loading import load_model
from tests.gguf_writer import write_gguf
from tests.loading.gguf_on_disk import gguf_metadata, gguf_tensors
from tests.loading.models_on_disk import TINY, random_tensors, write_config, write_model


def refusal(path, function=load_model) -> str:
    with pytest.raises(ValueError) as caught:
        function(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500, message
    return message


@pytest.mark.parametrize(
    ("renamed", "hint"),
    [
        (
            lambda name: name.removeprefix("model."),
            "lack the prefix 'model.', as AutoModel saves them",
        ),
        (lambda name: f"base_model.{name}", "begin with 'base_model.', as in a larger model or a wrapper"),
        (lambda name: f"language_model.{name}", "begin with 'language_model.'"),
    ],
)
def test_a_prefix_that_all_names_lack_or_have_is_named_once(tmp_path, renamed, hint):
    tensors = {renamed(name): value for name, value in random_tensors(TINY).items()}
    message = refusal(write_model(tmp_path, tensors))
    assert hint in message and "layers.0" not in message


def test_tensors_that_do_not_fit_otherwise_are_listed(tmp_path):
    tensors = random_tensors(TINY)
    del tensors["model.embed_tokens.weight"]
    assert "1 tensors do not fit: model.embed_tokens.weight is missing" in refusal(write_model(tmp_path, tensors))


@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize(
    ("adapter", "shown"),
    [
        (json.dumps({"base_model_name_or_path": "org/base"}), "an adapter of 'org/base': load"),
        ("[", "an adapter: load"),
    ],
)
def test_a_folder_of_an_adapter_says_so(tmp_path, with_config, adapter, shown):
    (tmp_path / "adapter_config.json").write_text(adapter)
    safetensors.numpy.save_file(random_tensors(TINY), tmp_path / "adapter_model.safetensors")
    if with_config:
        write_config(tmp_path)
    message = refusal(tmp_path)
    assert shown in message and "LoRARequest, or merge it" in message
    assert ("has no weights" if with_config else "config.json is missing") in message


def test_gguf_files_where_they_are_not_expected_are_named(tmp_path):
    metadata, tensors = gguf_metadata("llama", TINY), gguf_tensors("llama", TINY, random_tensors(TINY))
    (tmp_path / "Q8_0").mkdir()
    file = write_gguf(tmp_path / "Q8_0" / "m.gguf", metadata, tensors)
    for function in (load_model, model_facts):
        assert "give the path of a GGUF file below it: Q8_0/m.gguf" in refusal(tmp_path, function)
    for index in range(7):
        (tmp_path / "Q8_0" / f"{index}.gguf").touch()
    assert refusal(tmp_path).endswith("Q8_0/4.gguf and 3 more")
    file.rename(blob := tmp_path / "sha256-abc")
    assert refusal(blob).endswith("; it is a GGUF file: its name must end in .gguf")
    blob.write_bytes(b"text")
    assert refusal(blob).endswith("or a .gguf file")


@pytest.mark.parametrize("kind", ["adapter", "mmproj", np.array([1, 2], np.int32)], ids=str)
def test_a_gguf_file_that_is_no_whole_model_says_what_it_is(tmp_path, kind):
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata("llama", TINY) | {"general.type": kind}, {})
    assert f"general.type is {kind!r}, must be 'model'" in refusal(path)


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_model(tmp_path / "mine", random_tensors(TINY))
    assert load_model("~/mine")[0] == TINY
    assert "there is no model" in refusal("~/other")
