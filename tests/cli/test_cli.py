"""The `ksana` command: quick help, one line for an error, and what a run leaves behind."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from typer.main import get_command

import ksana_jax
from ksana_jax import cli

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from ksana_jax.cli import main; main()"]
EMPTY = [sys.executable, "-c", "import typer; app = typer.Typer(); app.command()(lambda: None); app()"]


def ksana(*args, cwd=ROOT):
    return subprocess.run([*COMMAND, *args], cwd=cwd, capture_output=True, text=True, timeout=60)


def cpu_seconds_of_help(command) -> float:
    """Seconds of CPU of a command's --help, whatever other processes of a busy machine take."""
    before = os.times()
    subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, timeout=60)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_takes_twice_the_cpu_of_an_empty_command_at_most():
    done = ksana("--help")  # writes the bytecode
    assert done.returncode == 0
    # 1.4 to 1.7. The least of several: a processor that two threads share takes up to twice the time.
    ours, least = (min(cpu_seconds_of_help(command) for _ in range(5)) for command in (COMMAND, EMPTY))
    assert ours < 2 * least
    for command in ("run", "report", "compare", "list", "trace", "generate", "plan", "doctor", "bench"):
        assert command in done.stdout


def test_help_imports_no_heavy_library():
    code = (
        "import sys\nfrom ksana_jax.cli import main\n"
        "try: main(['run', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'jax', 'numpy', 'matplotlib', 'omegaconf'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


def every_help():
    """Help of `ksana` and of each command, by the words that ask for it."""
    from typer.main import get_command

    found, groups = {}, [((), get_command(cli.app))]
    while groups:
        words, command = groups.pop()
        found[words] = command
        groups += [((*words, name), child) for name, child in getattr(command, "commands", {}).items()]
    return found


@pytest.mark.parametrize("words", sorted(every_help()), ids=" ".join)
def test_every_command_answers_to_h_and_shows_flags_without_a_type(run_ksana, words):
    code, shown, _ = run_ksana(*words, "-h")
    assert code == 0 and "Usage: ksana" in shown and "<bool>" not in shown


def test_defaults_are_words(run_ksana):
    assert "runs/NAME" in run_ksana("run", "-h")[1]
    assert "default: (never)" in run_ksana("serve", "-h")[1]


@pytest.mark.parametrize("words", sorted(every_help()), ids=" ".join)
def test_no_help_speaks_of_none(words):
    options = getattr(every_help()[words], "params", [])
    assert [option.name for option in options if "None" in (getattr(option, "help", None) or "")] == []


def test_what_ships_is_listed_one_line_each(run_ksana):
    for kind, some in {"experiments": "quickstart", "models": "ksana-tiny", "methods": "kv_eviction"}.items():
        code, shown, _ = run_ksana("list", kind)
        lines = [line.split() for line in shown.splitlines()]
        assert code == 0 and some in {line[0] for line in lines} and all(len(line) > 2 for line in lines)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("ksana run sink_w", ["sink_window"]),
        ("ksana run examples/pass", ["examples/passkey.yaml"]),
        ("ksana run quickstart settings.num_te", ["settings.num_texts="]),
        ("ksana trace pool quickstart engine.kv_eviction.bu", ["engine.kv_eviction.budget="]),
        ("ksana reproduce snap", ["snapkv"]),
        ("ksana serve ksana-t", ["ksana-tiny"]),
    ],
)
def test_a_shell_completes_names_and_keys(words, found):
    asked = {"_KSANA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(COMMAND, cwd=ROOT, env=os.environ | asked, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == found


def test_the_shell_completes_commands(run_ksana, monkeypatch):
    monkeypatch.setenv("_KSANA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "ksana ge")
    monkeypatch.setenv("COMP_CWORD", "1")
    code, shown, _ = run_ksana()
    assert code == 0 and shown.split() == ["generate"]


def test_python_m_is_the_command_and_its_version_that_of_the_package():
    done = subprocess.run(
        [sys.executable, "-m", "ksana_jax", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"ksana {ksana_jax.__version__}\n")


def test_doctor_ends_with_one_line_of_json(run_ksana):
    code, shown, _ = run_ksana("doctor", "--json")
    found = json.loads(shown.splitlines()[-1])
    assert code == 0 and found["backend"] == "cpu" and "jax" in found["packages"]
    used = {row["operator"]: row["name"] for row in found["operators"] if row["used"]}
    assert list(used) == ["attention", "kv_write", "linear", "norm", "sampling"]
    assert used["attention"] == used["kv_write"] and used["attention"] in ("native", "xla")


def test_doctor_of_a_model_shows_its_ends_with_their_files(run_ksana):
    code, out, _ = run_ksana("doctor", "ksana-tiny", "--json")
    *shown, line = out.splitlines()
    assert code == 0
    [end] = [fact for fact in json.loads(line) if fact["name"] == "ends a text"]
    assert end["value"] == "2 '</s>'"
    assert end["source"] == "generation_config.json, config.json, tokenizer_config.json"
    assert any("ends a text" in text and "2 '</s>'" in text for text in shown)
    assert "a model or --device" in fails(run_ksana, "doctor", "ksana-tiny", "--device", "cpu")


def fails(run_ksana, *args):
    """Standard error of a command that must end with exit code 2 and one line."""
    code, _, error = run_ksana(*args)
    assert code == 2 and error.count("\n") == 1 and error.startswith("ksana: error: ")
    return error


def test_errors_of_users_are_one_line_and_exit_code_2(run_ksana, tmp_path):
    assert "missing.yaml: no such experiment file" in fails(run_ksana, "run", tmp_path / "missing.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("engin: {}\n")
    assert "unknown key 'engin'; the nearest is 'engine'" in fails(run_ksana, "run", path)
    path.write_text("model: nowhere\n")
    assert "there is no model 'nowhere'" in fails(run_ksana, "run", path)
    assert "no records.jsonl here" in fails(run_ksana, "report", tmp_path)
    assert "there is no such folder" in fails(run_ksana, "report", tmp_path / "missing")
    assert "bad.yaml is a file, must be a folder" in fails(run_ksana, "run", "quickstart", "--out", path)
    assert "shard '9/2' is not k/n" in fails(run_ksana, "run", path, "--shard", "9/2")


def test_names_from_files_reach_a_terminal_escaped_and_cut(run_ksana, tmp_path):
    shutil.copytree(ROOT / "tests/golden/llama-gqa-tied", model := tmp_path / "model")
    tensors = {f"evil\x1b[31m\u202e{index}{'x' * 999}": np.zeros(99, np.float32) for index in range(99)}
    safetensors.numpy.save_file(tensors, model / "model.safetensors")
    error = fails(run_ksana, "generate", model, "--prompt", "text")
    assert r"evil\x1b[31m\u202e0xxx" in error and "\x1b" not in error and 1990 < len(error) < 2100


def test_options_of_a_benchmark_are_its_fields(run_ksana, monkeypatch):
    from ksana_jax.lab.bench import command

    asked, own = [], "experiments.benches.host:Host"
    monkeypatch.setattr(command, "run_and_show", lambda bench, **settings: asked.append((bench, settings)))
    code, _, _ = run_ksana("bench", own, "--rows", "4, 8", "--json", "--kv-eviction", "{method: h2o, budget: 0.1}")
    assert code == 0
    [(bench, settings)] = asked
    assert (bench.rows, bench.steps, bench.kv_eviction) == ((4, 8), 200, {"method": "h2o", "budget": 0.1})
    assert settings == {"repeats": 1, "out": None, "as_json": True}
    assert "kv_eviction={method" in fails(run_ksana, "bench", own, "--kv-eviction", "{method")
    assert "--rows is 'many', must be comma-separated numbers" in fails(run_ksana, "bench", own, "--rows", "many")


def test_debug_shows_where_an_error_comes_from(tmp_path):
    done = ksana("run", str(tmp_path / "missing.yaml"), "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr and "FileNotFoundError" in done.stderr


@pytest.mark.parametrize("place", [0, 5])
def test_verbose_says_what_is_loaded_and_compiled_wherever_it_stands(place):
    words = ["generate", "ksana-tiny", "--prompt=x", "--max-tokens", "1"]
    quiet, loud = ksana(*words), ksana(*words[:place], "-v", *words[place:])
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert loud.returncode == 0 and loud.stdout.count("\n") == 1
    assert "loaded " in loud.stderr and "KV pool: " in loud.stderr
    assert "compiled StepShape(" in loud.stderr or "found StepShape(" in loud.stderr  # in the store of programs


def test_a_package_of_the_users_that_hides_one_of_ours_is_named(run_ksana, monkeypatch, tmp_path):
    hiding = types.ModuleType("pallas_kernels")
    hiding.__path__ = [str(tmp_path)]

    def run(*_, **__):
        monkeypatch.setitem(sys.modules, "pallas_kernels", hiding)
        raise ModuleNotFoundError("No module named 'pallas_kernels.hopper'", name="pallas_kernels.hopper")

    monkeypatch.setattr("ksana_jax.lab.runs.command.run_and_report", run)
    error = fails(run_ksana, "run", "quickstart")
    assert f"'pallas_kernels.hopper'; {tmp_path} shadows ksana_jax's package 'pallas_kernels'" in error


def test_an_unknown_option_is_explained_by_the_command_itself(run_ksana):
    code, _, error = run_ksana("run", "--frobnicate")
    assert code == 2 and "frobnicate" in error


def test_report_prints_the_table_of_a_folder(run_ksana, tmp_path):
    rows = [{"label": "full", "point": {}, "trials": ["a"]}]
    kv = {
        "metric": "kv",
        "method": "stream",
        "block_bytes": 1024,
        "peak_blocks": 4,
        "position": [16],
        "live_blocks": [2],
    }
    nll = {
        "metric": "nll",
        "text": "t",
        "text_tokens": 32,
        "subset": "all",
        "bucket": 0,
        "bucket_tokens": 16,
        "sum": 15.0,
        "count": 15,
        "positions": "p",
    }
    speed = {"metric": "speed", "num_scored": 15, "seconds": 0.5, "compiled_while_timed": 0}
    records = [
        {"kind": "plan", "name": "n", "title": "Title", "task": "perplexity", "rows": rows, "time": 0},
        {"kind": "start", "trial": "a"},
        *({"kind": "measurement", "trial": "a", **m} for m in (nll, kv, speed)),
        {"kind": "done", "trial": "a"},
    ]
    lines = [json.dumps({"schema_version": 1, **r}) for r in records]
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    code, shown, _ = run_ksana("report", tmp_path)
    assert code == 0 and "Title" in shown and "2.72" in shown and "KV, KiB" in shown and "tokens/s" not in shown
    assert (tmp_path / "figure.pdf").stat().st_size > 1000


def test_quantize_writes_a_file_and_replaces_none(run_ksana, tmp_path):
    out = tmp_path / "tiny.gguf"
    code, shown, _ = run_ksana("quantize", "ksana-tiny", "--to", "q4_0", "--out", out)
    assert code == 0 and f"{out}: 1.2 MiB" in shown
    before = out.read_bytes()
    assert f"{out} exists; give another --out" in fails(run_ksana, "quantize", "ksana-tiny", "--out", out)
    assert out.read_bytes() == before


def test_visible_commands_are_within_their_limit():
    limits = dict(line.split() for line in (ROOT / ".ci" / "size.limits").read_text().splitlines())
    commands = get_command(cli.app).commands.values()
    assert sum(not command.hidden for command in commands) <= int(limits["commands"])
