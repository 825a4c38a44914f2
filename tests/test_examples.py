"""The examples run as they are, and their index has them all. Jupyter is not needed: code cells are plain Python."""

import ast
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import types
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml

from ksana_jax import LLM, SamplingParams
from ksana_jax.kv.eviction.base import Cached
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.report import read_report, write_tables
from tests.test_docs import parsed

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """Runs a notebook from top to bottom in an empty folder; returns what its cells show."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    monkeypatch.setitem(sys.modules, "a_notebook", module := types.ModuleType("a_notebook"))

    def run(name):
        seen = []
        for number, cell in enumerate(cells(EXAMPLES / name)):
            if cell["cell_type"] == "code":
                body = ast.parse("".join(cell["source"]))
                if is_shown := isinstance(body.body[-1], ast.Expr):
                    body.body[-1] = ast.Assign([ast.Name("_", ast.Store())], body.body[-1].value)
                exec(compile(ast.fix_missing_locations(body), f"{name}, cell {number}", "exec"), vars(module))
                seen += [module._] * is_shown
        return seen

    yield run
    plt.close("all")


@pytest.mark.soak
def test_attention_by_hand_draws(shown):
    shown("attention_by_hand.ipynb")
    [figure] = map(plt.figure, plt.get_fignums())
    assert len(figure.axes) >= 3


def test_the_experiment_in_a_notebook_shows_tables_and_a_figure(shown):
    [result, table, figure, record, compared, with_own] = shown("an_experiment.ipynb")
    assert "\n| SnapKV | 32 |" in repr(result) and "SnapKV | 32" in str(table) and figure.axes[0].lines
    assert record["metric"] == "nll" and "TOVA, budget 32 against SnapKV, budget 32" in compared
    assert (
        "\n| long values | 64 |" in repr(with_own) and "![figure](data:image/png;base64," in with_own._repr_markdown_()
    )
    assert not with_own.failed and len(with_own.records) == len(result.records) + 4 == 14


def test_the_engine_in_one_page_writes_what_llm_does():
    example = runpy.run_path(str(EXAMPLES / "one_request.py"))
    params = SamplingParams(temperature=0, max_tokens=8)
    [expected] = LLM("ksana-tiny", max_model_len=256, num_blocks=64).generate("def main(", params)
    assert example["generate"](example["build"]("ksana-tiny"), "def main(", params) == expected.outputs[0].text


def test_the_index_of_examples_names_every_file():
    index = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert {name for name in files if f"]({name})" in index} == files


README = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
KEYDIFF = EXAMPLES / "keydiff"


def test_the_readme_shows_the_method_and_the_table_that_follows_from_its_records(tmp_path):
    code = (KEYDIFF / "keydiff.py").read_text()
    assert f"```python\n{code[code.index('import') :]}```" in README
    write_tables(read_report(KEYDIFF / "results"), tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert table == (KEYDIFF / "results/table.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert "<!-- keydiff -->\n" + "\n".join(rows) + "\n<!-- /keydiff -->" in README


@pytest.fixture
def keydiff(monkeypatch):
    monkeypatch.syspath_prepend(str(KEYDIFF))
    return importlib.import_module("keydiff").KeyDiff


def test_the_method_of_the_readme_ranks_keys_as_its_paper_defines(keydiff):
    keys = np.random.default_rng(0).normal(size=(2, 3, 2, 9, 8)).astype(np.float32)
    num_tokens = np.array([9, 6])
    keys[1, ..., 6:, :] = np.nan  # unused slots hold anything
    cached = Cached(keys, None, None, None, num_tokens, None, num_tokens, None)
    found = keydiff().priority(cached, np)
    for at in np.ndindex(2, 3, 2):
        used = keys[at][: num_tokens[at[0]]].astype(np.float64)
        used /= np.linalg.norm(used, axis=-1, keepdims=True)
        anchor = used.mean(axis=0)
        similarity = used @ anchor / np.linalg.norm(anchor)
        assert (np.argsort(-found[at][: len(used)]) == np.argsort(similarity)).all()


def test_the_method_of_the_readme_serves_a_model_and_its_file_is_an_experiment(keydiff):
    rows = yaml.safe_load((KEYDIFF / "keydiff.yaml").read_text())
    assert [row.label for row in plan(rows | {"model": "ksana-tiny"}).rows][-1] == "KeyDiff"
    eviction = {**rows["variants"][-1]["engine.kv_eviction"], "budget": 16}
    llm = LLM("ksana-tiny", max_model_len=128, num_blocks=32, block_size=4, query_tile=4, kv_eviction=eviction)
    [output] = llm.generate("def main(" * 6, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 12 and llm.engine.memory.device.pool.num_used == 0
    llm.close()


def test_the_job_array_runs_the_part_of_its_task(tmp_path):
    array = {
        f"SLURM_ARRAY_TASK_{name}": value for name, value in zip(("ID", "MIN", "MAX", "COUNT"), "5562", strict=True)
    }
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    command = ["bash", EXAMPLES / "cluster/sweep.sbatch", "quickstart", "--dry-run"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **array, "PATH": path}, capture_output=True, text=True
    )
    of_one = subprocess.run(
        [sys.executable, "-m", "ksana_jax", "run", "quickstart", "--dry-run", "--shard", "1/2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == of_one.returncode == 0 and "trials" in done.stderr
    assert done.stderr == of_one.stderr


def test_the_ray_job_runs_a_study_on_a_cluster_with_workers():
    job = yaml.safe_load((EXAMPLES / "cluster/rayjob.yaml").read_text())
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[0] == "ksana" and parsed(words[1:]) == "run" and "ray" in words
    groups = job["spec"]["rayClusterSpec"]
    for group in (groups["headGroupSpec"], *groups["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert container["image"] and mounted == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_manifests_of_one_model_on_two_machines_run_a_command_that_exists():
    script = (EXAMPLES / "cluster/one-model.sbatch").read_text()
    command = re.search(r"^srun \S+ ksana (serve .*)$", script, re.M)[1].replace('"$@"', "ksana-tiny")
    job = yaml.safe_load((EXAMPLES / "cluster/jobset.yaml").read_text())["spec"]["replicatedJobs"][0]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    name, *words = container["args"]
    for given in (shlex.split(command), words):
        assert parsed(given) == "serve" and {"distributed=auto", "tensor_parallel_size=16"} <= {*given}
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert name == "ksana" and spec["completions"] == spec["parallelism"] and spec["completions"] * gpus == 16
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["template"]["spec"]["volumes"]}
