"""Pages in docs/ are right: code runs, commands parse, drawings are what the engine does, links lead somewhere."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from typer.main import get_command

from ksana_jax import AttentionPattern, cli
from ksana_jax.core.config import EngineConfig
from ksana_jax.core.gguf_file import TYPES
from ksana_jax.core.sources.catalogue import FETCHABLE
from ksana_jax.core.units import byte_size
from ksana_jax.engine import family_table
from ksana_jax.lab.runs.config import plan
from ksana_jax.loading.tensor_files import SafetensorsTensor
from tests import real
from tests.clients import CLIENTS
from tests.reference import literal

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    (
        *DOCS.glob("*.md"),
        *DOCS.glob("*/*.md"),
        *ROOT.glob("*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("experiments/*/README.md"),
    )
)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_pages_that_code_and_messages_name_exist():
    places = ("*.py", "*.yaml", "*.ipynb", "*.md", "Makefile")
    listed = subprocess.run(["git", "ls-files", *places], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {
        (name, page)
        for name in listed.split()
        for page in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", (ROOT / name).read_text(encoding="utf-8"))
    }
    gone = {(name, page) for name, page in named if not (ROOT / page).exists()}
    assert len(named) > 50 and {page for _, page in gone} == {"docs/gguf.md"}, gone  # ggml's


def test_the_python_of_the_page_for_jax_users_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, code in enumerate(blocks(DOCS / "use/jax.md", "python")):
        exec(compile(code, f"jax.md, block {number}", "exec"), names)
    assert "FLOPs" in capsys.readouterr().out
    assert [*tmp_path.glob("profile/**/*.xplane.pb")]
    assert (
        float(np.abs(names["logits"](names["params"], names["hidden"], config=names["config"]) - names["scores"]).max())
        == 0
    )
    assert jax.tree.structure(names["edited"]) == jax.tree.structure(names["params"])


def test_drawings_of_patterns_are_what_the_patterns_do():
    text = (DOCS / "learn/concepts.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^`AttentionPattern\((.*?)\)`.*?```\n(.*?)^```$", text, re.M | re.S)
    assert len(drawn) == 5
    for fields, drawing in drawn:
        pattern = AttentionPattern(**{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", fields)})
        visible, _ = literal(pattern, *np.ogrid[:10, :10])
        assert [line.split() for line in drawing.splitlines()] == [
            ["#" if visible[q, k] else "." for k in range(q + 1)] for q in range(10)
        ]


def test_drawn_distances_of_sinks_are_what_the_patterns_do():
    text = (DOCS / "learn/concepts.md").read_text(encoding="utf-8")
    seen, *rows = re.search(r"^visible to query 9 (.*?)^```$", text, re.M | re.S)[0].splitlines()[:4]
    assert seen.split()[4:] == [*"##....####"]
    for row in rows:
        name, distances = re.fullmatch(r'distance, "(\w+)" +(.*)', row).groups()
        pattern = AttentionPattern(window=4, num_sinks=2, sink_position=name)
        visible, stands = literal(pattern, *np.ogrid[:10, :10])
        expected = [stands[9, k] - k for k in range(10) if visible[9, k]]
        assert [int(d) for d in distances.split()] == expected


def commands(page):
    """What `ksana` is given in a page's console blocks and in the table of README, word by word."""
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"^\$ (?:.* \| )?ksana (.*)$", text, re.M)
    lines += [line.partition("    ")[0] for line in re.findall(r"^ksana (.*)$", text, re.M)]
    return [shlex.split(line.partition("  ")[0]) for line in lines]


def parsed(words):
    """Parses a command line without running it; returns the words that name the command."""
    command, name = get_command(cli.app), []
    while words[0] in getattr(command, "commands", {}):
        command = command.commands[words[0]]
        name, words = [*name, words[0]], words[1:]
        if not words:
            break
    command.make_context(" ".join(name), list(words))
    return " ".join(name)


def test_commands_in_pages_exist_and_take_the_options_shown():
    for page in PAGES:
        for words in commands(page):
            parsed(words)


README = (ROOT / "README.md").read_text(encoding="utf-8")
# Studies of many minutes: of most only the plan.
SHORTER = {name: ["--dry-run"] for name in ("eviction_budget", "ruler", "equal_recent")}
SHORTER["examples/keydiff/keydiff.yaml"] = ["seeds=[0]"]


def test_readme_installs_what_there_is():
    targets, extras = re.findall(r"^make (\S+)", README, re.M), re.findall(r"pip install -e '\.\[(\w+)\]'", README)
    assert targets == ["real", "test"] and extras == ["cuda", "server"]
    assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)
    assert {*extras} < tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()


@pytest.mark.soak
@real.smollm2
def test_readme_runs_as_pasted(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    python = blocks(ROOT / "README.md", "python")[-1]
    pasted = [*commands(ROOT / "README.md"), *map(str.split, re.findall(r"`ksana (run [^`]+)`", README))]
    assert len(pasted) > 8 and {*SHORTER} < {words[-1] for words in pasted}
    for words in [["-m", "ksana_jax", *words, *SHORTER.get(words[-1], ())] for words in pasted] + [["-c", python]]:
        for folder in words[3:] if words[2:3] == ["compare"] else ():
            shutil.copytree(tmp_path / "runs/sink_window", tmp_path / folder)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout + done.stderr, (words, done.stderr)


def visible(command, words=()):
    """The visible commands below one, by the words that name them."""
    children = getattr(command, "commands", {})
    shown = [(k, c) for k, c in children.items() if not c.hidden]
    found = {name: c for k, child in shown for name, c in visible(child, (*words, k)).items()}
    return found if children else {" ".join(words): command}


def test_every_command_has_a_how_to():
    shown = {parsed(words) for words in commands(DOCS / "reference/commands.md")}
    assert {name for name in shown if ":" not in name} == set(visible(get_command(cli.app)))


@pytest.mark.parametrize("name", visible(get_command(cli.app)))
def test_the_help_of_a_command_ends_with_an_example_and_a_page(name):
    example, page = visible(get_command(cli.app))[name].epilog.split("\n\n")
    assert parsed(shlex.split(example.removeprefix("Example: ksana "))) == name
    assert (DOCS.parent / page.removeprefix("Docs: ")).is_file()


def test_the_page_on_models_names_what_is_read_and_what_is_fetched():
    text = (DOCS / "reference/models.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].strip("| `"): line for line in text.splitlines() if line.startswith("| ")}
    for name, types in (("safetensors", SafetensorsTensor.dtypes), ("GGUF", [kind.name for kind in TYPES.values()])):
        assert set(rows[name].strip("| ").split(" | ")[-1].split(", ")) == set(types)
    assert family_table.table() in text, "ksana list models --markdown prints the table"
    for name, wanted in FETCHABLE.items():
        assert byte_size(wanted.num_bytes) in rows[name]


def test_the_page_on_serving_and_the_extra_name_the_clients_that_make_soak_runs():
    section = (DOCS / "use/serving.md").read_text(encoding="utf-8").split("\n## Clients\n")[1].split("\n## ")[0]
    [listed] = re.findall(r"newest versions of (.*?) against", section, re.S)
    rows = {line.split()[1] for line in section.splitlines() if line.startswith("| ")}
    assert re.split(r", | and\s", listed) == [*CLIENTS] and rows >= CLIENTS.keys()
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["clients"]
    assert sorted(Requirement(text).name for text in extra) == sorted({*CLIENTS} - {"instructor"})  # see the Makefile


def test_the_tutorial_works_by_copy_and_paste(tmp_path, monkeypatch, capsys):
    page = DOCS / "learn/tutorial.md"
    method, check, engine = blocks(page, "python")
    (tmp_path / "value_norm.py").write_text(method)
    (tmp_path / "value_norm.yaml").write_text(*blocks(page, "yaml"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert commands(page)[0] == ["run", "value_norm.yaml"]
    with pytest.raises(SystemExit) as ended:
        cli.main(commands(page)[0])
    assert not ended.value.code
    table = (tmp_path / "runs/value_norm/table.md").read_text()
    assert re.findall(r"^\| (.+?) \|", table, re.M)[2:] == [
        "full",
        "sinks + window",
        "attention alone",
        "times the norm",
    ]
    checks = {}
    exec(check, checks)
    checks["test_priority_is_attention_times_the_norm_of_the_value"]()
    capsys.readouterr()
    exec(engine, {})
    assert capsys.readouterr().out.strip()


def test_the_defaults_on_the_page_on_serving_are_the_engine_s():
    text = (DOCS / "use/serving.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text.split("| setting | default |\n")[1].split("\n\n")[0], re.M))
    found = EngineConfig()
    assert {name: rows[name] for name in ("max_num_seqs", "max_num_batched_tokens", "block_size")} == {
        "max_num_seqs": str(found.max_num_seqs),
        "max_num_batched_tokens": str(found.max_num_batched_tokens),
        "block_size": str(found.block_size),
    }
    assert rows["memory_bytes"].startswith("2 GiB") and found.memory_bytes == 2 << 30
    assert (found.max_model_len, found.dtype, found.kv_cache_dtype) == (None, "f32", "auto")


def test_the_experiment_of_the_page_on_experiments_is_one():
    [text] = blocks(DOCS / "use/experiments.md", "yaml")
    assert [row.label for row in plan(yaml.safe_load(text)).rows] == ["full", "sinks + window"]


def test_the_drawn_step_and_the_drawn_blocks_are_what_their_numbers_say():
    text = (DOCS / "learn/concepts.md").read_text(encoding="utf-8")
    steps = [line.split() for line in re.findall(r"^step \d   ([ABC ]+?)(?:  .*)?$", text, re.M)]
    assert [len(step) for step in steps] == [16, 16, 4, 3] and sum(step.count("C") for step in steps[:3]) == 30
    assert re.findall(r"^(?:between steps|within a step)   (\S+)", text, re.M) == ["#" * 8, "#" * 8 + "c" * 16]


@pytest.mark.soak
def test_pages_build_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="needs the extra docs")
    build = [sys.executable, "docs/build.py", str(tmp_path / "html")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ksana_jax.LLM.generate" in (tmp_path / "html" / "reference-api.html").read_text(encoding="utf-8")
    assert (tmp_path / "html" / "experiments-quickstart.html").is_file()


@pytest.mark.parametrize(
    "module",
    [
        "ksana_jax",
        "ksana_jax.models",
        "ksana_jax.loading",
        "ksana_jax.tokenizers",
        "ksana_jax.engine.inspect",
        "ksana_jax.lab.trace",
        "ksana_jax.lab.recall",
        "ksana_jax.extend",
    ],
)
def test_the_python_reference_lists_every_public_name(module):
    section = (DOCS / "reference/api.md").read_text(encoding="utf-8").split(f"## `{module}`\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\.\. (?:auto\w+|py:data):: (\w+)", section, re.M)
    assert sorted(listed) == sorted(importlib.import_module(module).__all__)
