"""Experiments on data that must be fetched say so before any trial, and run on a stand-in."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import yaml

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import load, plan
from ksana_jax.lab.runs.run import run
from ksana_jax.lab.runs.tasks.harness import Harness, load_tasks

CONFIGS = Path(__file__).parents[3] / "configs"
MISSING = {
    "pg19": "data/pg19/test",
    "wikitext2": "data/wikitext-2/test.txt",
    "gsm8k": "data/gsm8k/test.jsonl",
    "longbench": "data/longbench/qasper.jsonl",
    "ruler_lines": "data/ruler/niah_single_1.jsonl",
}
has_harness = importlib.util.find_spec("lm_eval") is not None
STAND_INS = {
    "gsm8k/test.jsonl": [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(4)],
    "gsm8k/train.jsonl": [{"question": f"What is {n} plus 2?", "answer": f"#### {n + 2}"} for n in range(9)],
    "ruler/niah_single_1.jsonl": [
        {"input": f"The number is {n}. The number is", "outputs": [str(n)]} for n in range(4)
    ],
}


@pytest.fixture
def configs(tmp_path):
    """A copy of configs/, with nothing beside it."""
    shutil.copytree(CONFIGS / "experiments", tmp_path / "configs" / "experiments")
    shutil.copytree(CONFIGS / "lm-eval", tmp_path / "configs" / "lm-eval")
    return tmp_path / "configs" / "experiments"


def write_lines(root, name):
    path = root / "data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in STAND_INS[name]))


@pytest.mark.parametrize("name", MISSING)
def test_missing_data_is_named_with_what_to_fetch(name, configs, tmp_path, run_ksana):
    path = configs / f"{name}.yaml"
    fetch = yaml.safe_load(path.read_text())["fetch"]
    code, _, error = run_ksana("run", path, "--out", tmp_path / "out")
    assert (code, error) == (2, f"ksana: error: {tmp_path / MISSING[name]} is missing. {fetch}\n")
    assert not (tmp_path / "out").exists()
    assert any(licence in fetch for licence in ("Apache-2.0", "MIT", "CC BY-SA"))


@pytest.mark.parametrize("name", ["gqa_quality", "spec_trie", "trained_sinks"])
def test_a_model_that_is_trained_first_is_named_with_the_command(name, tmp_path, monkeypatch, run_ksana):
    monkeypatch.chdir(tmp_path)
    code, _, said = run_ksana("run", name)
    assert (
        code == 2
        and said.startswith("ksana: error: there is no model 'runs/")
        and said.endswith(".sh trains its models\n")
    )


def test_without_a_sentence_the_entry_is_named(tmp_path):
    (tmp_path / "x.yaml").write_text("settings: {texts: [gone.txt]}")
    with pytest.raises(FileNotFoundError, match=r"settings\.texts: .*gone\.txt: no such text file"):
        load(tmp_path / "x.yaml")


@pytest.mark.parametrize("name, file", [("pg19", "pg19/test/1.txt"), ("wikitext2", "wikitext-2/test.txt")])
def test_perplexity_runs_on_a_stand_in(name, file, configs, tmp_path, model, make_llm):
    path = tmp_path / "data" / file
    path.parent.mkdir(parents=True)
    path.write_text("It was a dark night. " * 200)
    made = load(configs / f"{name}.yaml", [f"model={model}", "settings.num_texts=1"])
    outcome = run(made, tmp_path / "out", make_llm=make_llm)
    assert not outcome.failed and outcome.num_done == len(made.trials) >= 6


def test_settings_of_the_harness_are_checked(tmp_path, model):
    lines = tmp_path / "a.jsonl"
    lines.write_text("{}\n")

    def refused(**settings):
        with pytest.raises(ConfigError) as refusal:
            plan({"task": "harness", "model": model, "settings": settings})
        return str(refusal.value)

    assert "settings.tasks is empty" in refused()
    said = "settings.data has 1 files and settings.tasks 2 names"
    assert said in refused(tasks=["a", "b"], data=[str(lines)])
    assert "settings.fewshot_data needs settings.data" in refused(tasks=["a"], fewshot_data=[str(lines)])
    if not has_harness:
        assert "needs the extra eval: pip install 'ksana-jax[eval]'" in refused(tasks=["a"], data=[str(lines)])


def test_changed_data_make_other_trials(tmp_path):
    lines = tmp_path / "a.jsonl"
    settings = Harness.Settings(tasks=["a"], data=[str(lines)])
    digests = []
    for content in ("{}", "[]"):
        lines.write_text(content)
        digests.append(Harness().inputs(settings))
    assert digests[0].keys() == {"data"} and digests[0] != digests[1]


@pytest.mark.skipif(not has_harness, reason="needs the extra eval")
@pytest.mark.filterwarnings("default")
def test_a_task_file_is_registered_without_its_neighbours(tmp_path, caplog):
    (tmp_path / "mine.jsonl").write_text('{"a": "b"}\n')
    task = "task: mine\ndataset_path: json\ntest_split: test\noutput_type: generate_until\n"
    (tmp_path / "mine.yaml").write_text(f"{task}doc_to_text: a\ndoc_to_target: b\n")
    (tmp_path / "ruler.yaml").write_text("task: ruler\nmodel: ksana-tiny\n")
    (tmp_path / "other.yaml").write_text("titel: x\n")
    settings = {"tasks": ["mine"], "data": [str(tmp_path / "mine.jsonl")], "task_files": [str(tmp_path / "mine.yaml")]}
    assert load_tasks(Harness.Settings(**settings)).keys() == {"mine"} and "ruler" not in caplog.text
    with pytest.raises(ConfigError, match=r"other\.yaml is no task of the harness: "):
        load_tasks(Harness.Settings(**settings | {"task_files": [str(tmp_path / "other.yaml")]}))


@pytest.mark.soak
@pytest.mark.skipif(not has_harness, reason="needs the extra eval")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["gsm8k", "ruler_lines"])
def test_the_harness_runs_on_a_stand_in(name, configs, tmp_path, one_layer, monkeypatch):
    import datasets

    from ksana_jax.lab.runs.report import report

    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for file in STAND_INS:
        write_lines(tmp_path, file)
    small = ["settings.num_samples=1", "settings.num_fewshot=0", "seeds=[0, 1]", "engine.max_model_len=320"]
    small += ["engine.max_num_batched_tokens=32", "engine.max_num_seqs=1"]
    made = load(configs / f"{name}.yaml", [f"model={one_layer}", "load_format=dummy", *small])
    outcome = run(made, tmp_path / "out")
    assert not outcome.failed
    [full, _] = report(tmp_path / "out").rows
    [key] = [k for k in full.values if k.endswith(("recall", "exact_match,strict-match"))]
    assert full.mean(key) == 0.0 and (full.mean("peak_kv_bytes") or 0) > 0
    # Each seed draws other documents, which rows have in common.
    assert len(set(full.samples[key])) == 2 and all(len(s) == 1 for s in full.samples[key])
