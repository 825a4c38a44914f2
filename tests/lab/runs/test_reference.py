"""The reference of experiment files: it has every key, says what each means, and is the page in docs/."""

import sys
from pathlib import Path

import pytest
import yaml

from ksana_jax.core.config import EngineConfig
from ksana_jax.core.patterns import AttentionPattern
from ksana_jax.lab.runs import reference
from ksana_jax.lab.runs.config import Experiment, plan
from ksana_jax.lab.runs.tasks import TASKS, task_named

DOCS, EXAMPLES = Path(__file__).parents[3] / "docs", Path(__file__).parents[3] / "examples"


def printed(run_ksana, *args):
    code, shown, _ = run_ksana("list", "tasks", *args)
    assert code == 0
    return shown


def test_the_page_in_docs_is_what_the_command_prints(run_ksana):
    page = (DOCS / "reference/yaml.md").read_text(encoding="utf-8")
    assert page == printed(run_ksana, "--markdown"), (
        "write it again: ksana list tasks --markdown > docs/reference/yaml.md"
    )


@pytest.mark.parametrize("cls", [Experiment, EngineConfig, AttentionPattern], ids=lambda cls: cls.__name__)
def test_every_key_of_an_experiment_is_explained(cls):
    assert [f.name for f in reference.fields_of(cls) if not f.meaning] == []


@pytest.mark.parametrize("name", TASKS)
def test_every_setting_of_a_task_is_explained(name):
    assert reference.summary(type(task_named(name))).endswith(".")
    assert [f.name for f in reference.fields_of(task_named(name).Settings) if not f.meaning] == []


def test_types_and_defaults_are_written_as_in_yaml():
    fields = {f.name: f for f in (*reference.fields_of(EngineConfig), *reference.fields_of(Experiment))}
    assert fields["num_blocks"][1:3] == ("int or null", "null")
    assert fields["preempt"][1:3] == ('"swap" or "recompute" or "auto"', '"auto"')
    assert fields["enable_prefix_caching"].default == "false"
    assert (fields["engine"].default, fields["seeds"].default) == ("{}", "[0]")


def test_the_command_lists_all_tasks_or_one_of_the_users_own(run_ksana, monkeypatch):
    lines = printed(run_ksana).splitlines()
    assert [line.split()[0] for line in lines] == [*TASKS] and all(line.endswith(".") for line in lines)
    monkeypatch.syspath_prepend(EXAMPLES)
    try:
        shown = printed(run_ksana, "passkey:Passkey")
    finally:
        sys.modules.pop("passkey", None)
    assert shown.startswith("passkey:Passkey  ") and "settings.num_filler_lines" in shown
    assert "perplexity" not in shown


def test_the_file_that_the_page_begins_with_is_an_experiment():
    text = reference.INTRODUCTION.split("```yaml\n")[1].split("```")[0]
    made = plan(yaml.safe_load(text))
    assert [row.label for row in made.rows] == ["full", "sinks + window"] and len(made.trials) == 6
    assert made.trials[-1].config["pattern"]["window"] == 112
