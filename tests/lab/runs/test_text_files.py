"""Sources in `texts`: files, folders, patterns and fields of JSON lines, relative to the file that names them."""

import json
import re

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs import text_files
from ksana_jax.lab.runs.config import load, plan


@pytest.fixture
def corpus(tmp_path):
    """A folder of texts, one of them hidden and one in a folder of its own."""
    for name in ("b.txt", "a.md", "deep/c.txt", ".hidden", ".git/config"):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}")
    lines = [json.dumps({"content": f"line {n}", "id": n}) for n in (1, 2)]
    (tmp_path / "corpus" / "deep" / "data.jsonl").write_text("\n".join(lines) + "\n\n")
    return tmp_path / "corpus"


def names(*entries):
    return [name for name, _ in text_files.candidates([str(e) for e in entries])]


def test_a_file_a_folder_and_a_pattern_give_texts_in_sorted_order(corpus):
    assert text_files.candidates([str(corpus / "b.txt")]) == [("b.txt", "text of b.txt")]
    assert names(corpus / "*.txt") == ["b.txt"]
    assert names(corpus / "**/*.txt") == ["b.txt", "deep/c.txt"]
    assert names(corpus / "?.m[a-z]", corpus / "b.txt") == ["a.md", "b.txt"]
    assert names(corpus / "deep" / "c.txt", corpus / "*") == ["c.txt", "a.md", "b.txt"]
    (corpus / "deep" / "data.jsonl").unlink()
    assert names(corpus) == ["a.md", "b.txt", "deep/c.txt"]


def test_a_field_of_json_lines_gives_a_text_a_line(corpus):
    assert text_files.candidates([f"{corpus}/deep/data.jsonl#content"]) == [
        ("data.jsonl:1", "line 1"),
        ("data.jsonl:2", "line 2"),
    ]
    assert names(f"{corpus}/**/*.jsonl#content") == ["deep/data.jsonl:1", "deep/data.jsonl:2"]


def test_a_name_with_a_number_sign_is_a_file(corpus):
    (corpus / "c#.txt").write_text("x")
    assert names(corpus / "c#.txt") == ["c#.txt"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("none.txt", "settings.texts: FOLDER/none.txt: no such text file. Entries of a YAML file are relative to"),
        ("*.rst", "settings.texts: FOLDER/*.rst: pattern matches no text file"),
        (
            "deep/data.jsonl",
            "settings.texts: FOLDER/deep/data.jsonl needs the name of a field: write FOLDER/deep/data",
        ),
        ("deep/data.jsonl#text", "FOLDER/deep/data.jsonl line 1 is not a JSON object with a field 'text'"),
        ("deep/data.jsonl#id", "FOLDER/deep/data.jsonl line 1: 'id' is 1, must be text"),
        ("binary.txt", "settings.texts: FOLDER/binary.txt is not UTF-8 text"),
        ("empty", "settings.texts: FOLDER/empty: folder holds no text file"),
    ],
)
def test_what_names_no_text_is_refused_with_the_setting(corpus, entry, said):
    (corpus / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (corpus / "empty").mkdir()
    with pytest.raises((ConfigError, FileNotFoundError), match=re.escape(said.replace("FOLDER", str(corpus)))):
        text_files.candidates([f"{corpus}/{entry}"])


def test_texts_of_a_file_start_at_its_folder_and_those_of_an_override_at_the_working_directory(
    corpus, tmp_path, monkeypatch, model
):
    path = tmp_path / "study" / "mine.yaml"
    path.parent.mkdir()
    experiment = {
        "task": "generate",
        "model": model,
        "settings": {"texts": ["../corpus/b.txt"]},
        "variants": [
            {"name": "own"},
            {"name": "nested", "settings": {"texts": ["../corpus/a.md"]}},
            {"name": "dotted", "settings.texts": ["../corpus/deep/c.txt", str(corpus / "b.txt")]},
        ],
    }
    path.write_text(json.dumps(experiment))
    monkeypatch.chdir(corpus)
    found = [trial.config["settings"]["texts"] for trial in load(path).trials]
    there = tmp_path / "study" / "../corpus"
    assert found == [[f"{there}/b.txt"], [f"{there}/a.md"], [f"{there}/deep/c.txt", f"{corpus}/b.txt"]]
    del experiment["variants"]
    path.write_text(json.dumps(experiment))
    (trial,) = load(path, ["settings.texts=[deep/c.txt]"]).trials
    assert trial.config["settings"]["texts"] == ["deep/c.txt"]
    path.write_text(json.dumps({**experiment, "grid": {"settings.texts": [["../corpus/b.txt"], ["../corpus/a.md"]]}}))
    assert [t.config["settings"]["texts"] for t in load(path).trials] == [[f"{there}/b.txt"], [f"{there}/a.md"]]
    path.write_text(json.dumps({**experiment, "settings": {"texts": ["gone"]}}))
    with pytest.raises(FileNotFoundError, match=r"settings\.texts: .*study/gone: no such text file"):
        load(path)


def test_where_texts_lie_is_no_part_of_a_trial_s_id_and_what_they_hold_is(corpus, tmp_path, model):
    def trial_id(path):
        return plan({"task": "generate", "model": model, "settings": {"texts": [str(path)]}}).trials[0].id

    elsewhere = tmp_path / "elsewhere" / "b.txt"
    elsewhere.parent.mkdir()
    elsewhere.write_text("text of b.txt")
    assert trial_id(corpus / "b.txt") == trial_id(elsewhere)
    other = tmp_path / "other" / "b.txt"
    other.parent.mkdir()
    other.write_text("another text")
    assert trial_id(other) != trial_id(elsewhere)


def test_names_stand_for_texts_wherever_they_are_written(tmp_path, monkeypatch):
    from ksana_jax.lab.runs import config

    monkeypatch.setattr(text_files, "fetched", lambda name: tmp_path / "got" if (tmp_path / "got").exists() else None)
    [(name, text)] = text_files.candidates(["python-docs"])
    assert name == "python-docs" and "lambda" in text and text.count("\n\n") > 1000
    with pytest.raises(FileNotFoundError, match=r"settings\.texts: essays is not here yet: ksana fetch essays"):
        text_files.candidates(["essays"])
    (tmp_path / "got").mkdir()
    (tmp_path / "got" / "one.txt").write_text("an essay")
    text_files._candidates.cache_clear()
    assert text_files.candidates(["essays"]) == [("one.txt", "an essay")]
    given = {"settings": {"texts": ["python-docs", "essays", "a.txt"]}}
    anchored = config._anchored(given, tmp_path, "perplexity")
    assert anchored["settings"]["texts"] == ["python-docs", "essays", str(tmp_path / "a.txt")]
    (tmp_path / "essays").mkdir()  # a user's own comes first
    assert config._anchored(given, tmp_path, "perplexity")["settings"]["texts"][1] == str(tmp_path / "essays")
