"""`ksana lm-eval` where the extra eval is missing, and the names under which the model is found."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_the_extra_the_command_names_it(run_ksana):
    code, _, error = run_ksana("lm-eval", "run", "--model", "ksana", "--tasks", "wikitext")
    assert code == 2
    assert error == "ksana: error: this needs lm-evaluation-harness, the extra eval: pip install 'ksana-jax[eval]'\n"


def test_the_entry_point_names_the_class():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lm_eval.models"]["ksana"].partition(":")
    assert f"class {name}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
