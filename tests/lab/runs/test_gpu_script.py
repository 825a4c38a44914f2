"""`python -m experiments.gpu`: its processes, limits, faults and table, without a GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from experiments.gpu import driver, plan
from experiments.gpu.context import RESTART
from experiments.gpu.importing import import_bundle
from experiments.gpu.table import table
from ksana_jax.lab.runs.report import read_report
from tests.lab.runs.gpu_context import make_context

ROOT = Path(__file__).parents[3]

# A section without jax: its name says what it does.
FAKE = """
import json, os, signal, sys, time
records, name, folder = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--records", "--child", "--folder"))
if name == "dies before its turn":
    sys.exit(3)
sys.stdin.readline()
with open(records) if os.path.exists(records) else open(os.devnull) as file:
    before = len(file.readlines())
def write(text):
    with open(records, "a") as file:
        file.write(text)
value = {"kind": "value", "metric": name, "value": before, "unit": "", "bar": "", "met": None}
write(json.dumps({"section": name, **value}) + "\\n")
if name == "hangs":
    time.sleep(60)
if name == "raises":
    raise ValueError("what went wrong")
if name == "is killed while it writes":
    write('{"section": "half')
    os.kill(os.getpid(), signal.SIGSEGV)
if name == "has a faulty kernel" and not before:
    os._exit(75)
if name == "compiles two programs and aborts" and "--careful" not in sys.argv:
    for number, who in enumerate(("hopper", "triton")):
        with open(f"{folder}/mark-{number}.json", "w") as file:
            json.dump({"what": "compiles", "who": who, "case": "64x4k"}, file)
    os.abort()
print("done with", name)
"""


def fake_run(tmp_path: Path, names: list[str], total_s: float = 60.0, most_s: int = 10) -> dict:
    """The driver's results for fake sections."""
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    chosen = [plan.Section(name, "", 2 if name == "hangs" else most_s, 1) for name in names]
    driver.run_all(chosen, tmp_path, total_s=total_s, options=[], program=(sys.executable, str(program)))
    return driver.load(tmp_path / "results.json")


def test_a_section_that_hangs_raises_or_crashes_costs_only_itself(tmp_path):
    names = ["first", "hangs", "raises", "is killed while it writes", "dies before its turn", "last"]
    results = fake_run(tmp_path, names)
    status = {name: section["status"] for name, section in results["sections"].items()}
    assert status == {
        "first": "ok",
        "hangs": "overran its 2 s",
        "raises": "crashed with exit status 1",
        "is killed while it writes": "crashed with SIGSEGV",
        "dies before its turn": "crashed with exit status 3",
        "last": "ok",
    }
    # What they had recorded before is there, and half a line harms nobody.
    assert [r["section"] for r in results["records"]] == [n for n in names if n != "dies before its turn"]
    assert "what went wrong" in "\n".join(results["sections"]["raises"]["last_lines"])
    text = table(results)
    assert all(name in text for name in names) and "overran" in text


def test_a_section_begins_anew_after_a_kernels_fault(tmp_path):
    results = fake_run(tmp_path, ["has a faulty kernel"])
    assert RESTART == 75
    assert results["sections"]["has a faulty kernel"]["status"] == "ok, 1 times restarted after a kernel's fault"
    assert [r["value"] for r in results["records"]] == [0, 1]


def test_after_an_abort_that_several_threads_may_have_caused_they_take_turns(tmp_path):
    results = fake_run(tmp_path, ["compiles two programs and aborts"])
    [section] = results["sections"].values()
    assert section["status"] == "ok, 1 times restarted after a kernel's fault"
    assert not [r for r in results["records"] if r["kind"] == "fault"]  # nobody is blamed without need


# A section of four cases in whose second a kernel aborts the process, as Mosaic's runtime does on a CUDA error.
ABORTING = """
import os, sys
from experiments.gpu import candidates, cases
from experiments.gpu.__main__ import parse
from experiments.gpu.child import run_child
from experiments.gpu.race import Entry, race
from experiments.gpu.sections import decode

def run(context):
    entries = []
    for name in ("first", "second", "third", "fourth"):
        case = cases.Case(name, (40, 33), 16, 4, 2, 64, tiny=True)
        good = candidates.ours_as("good", candidates.reference(), case)
        def result(out, aborts=name == "second"):
            if aborts:
                os.abort()
            return out
        entries.append(Entry(case, [good, candidates.dataclasses.replace(good, name="bad", result=result)]))
    race(context, "decode, blocks of 64", entries)

decode.run = run
sys.exit(run_child(parse(sys.argv[1:])))
"""


@pytest.mark.soak
def test_a_kernel_that_aborts_the_process_costs_one_case(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = tmp_path / "aborting.py"
    program.write_text(ABORTING)
    options = ["--tiny", "--peer-python", sys.executable]
    out = tmp_path / "out"
    out.mkdir()
    driver.run_all([plan.by_name("decode")], out, total_s=100, options=options, program=(sys.executable, str(program)))
    results = driver.load(out / "results.json")
    # Once more where threads were compiling meanwhile: then they take turns first, and nobody is blamed without need.
    assert re.fullmatch("ok, [12] times restarted after a kernel's fault", results["sections"]["decode"]["status"])
    [fault] = [r for r in results["records"] if r["kind"] == "fault"]
    assert (fault["who"], fault["case"]) == ("bad", "second") and "SIGABRT" in fault["reason"]
    timed = [(r["case"], r["who"]) for r in results["records"] if r["kind"] == "time" and r["mode"] == "chained"]
    cases_of = {who: {case for case, name in timed if name == who} for who in ("good", "bad")}
    assert cases_of["good"] == {"first", "second", "third", "fourth"}
    assert cases_of["bad"] == {"first", "third", "fourth"}
    assert len(timed) == len(set(timed))  # nothing is measured twice


def test_sections_share_what_they_have_compiled_and_autotuned(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    found = driver._environment(tmp_path)
    assert found["JAX_COMPILATION_CACHE_DIR"].startswith(str(tmp_path))
    # jax keeps the autotuner's results of XLA for GPUs under the same folder.
    assert found["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] == "xla_gpu_per_fusion_autotune_cache_dir"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    assert driver._environment(tmp_path)["JAX_COMPILATION_CACHE_DIR"] == "elsewhere"


def test_sections_for_which_no_time_is_left_are_not_run_and_said_so(tmp_path):
    began = time.monotonic()
    results = fake_run(tmp_path, ["hangs", "late"], total_s=plan.CLOSING_S + 1.0)
    assert time.monotonic() - began < plan.CLOSING_S + 5
    assert results["sections"]["late"]["status"] == "not run: no time left"


def test_limits_leave_later_sections_their_least():
    sections = list(plan.SECTIONS)
    left = plan.TOTAL_S - plan.CLOSING_S
    for index, section in enumerate(sections):
        limit = plan.limit_s(index, sections, left)
        assert limit >= section.least_s, section
        left -= limit  # each takes all that it may
    assert left >= 0
    with pytest.raises(ValueError, match="no section 'decodes'; sections are environment, "):
        plan.by_name("decodes")


def test_a_kernel_that_hangs_ends_the_process_and_is_left_out_afterwards(tmp_path):
    script = """
        import sys, time
        from pathlib import Path
        from experiments.gpu.context import Context
        records = Path(sys.argv[1])
        context = Context("decode", records, time.monotonic() + 60, folder=records.parent)
        with context.guard("hopper", "64x4k", seconds=0.3):
            time.sleep(20)
    """
    records = tmp_path / "records.jsonl"
    command = [sys.executable, "-c", textwrap.dedent(script), str(records)]
    assert subprocess.run(command, cwd=ROOT, timeout=15, stdout=subprocess.DEVNULL).returncode == RESTART
    context = make_context(tmp_path)
    assert context.excluded("hopper", "64x4k")
    assert not context.excluded("hopper", "1x4k") and not context.excluded("triton", "64x4k")
    context.record("fault", who="hopper", case="1x4k", reason="CUDA_ERROR_ILLEGAL_ADDRESS")
    assert context.excluded("hopper", "8x8k")  # the second time is once too often


def test_times_that_were_taken_beside_compilers_are_marked():
    quiet = record_of("hopper", 280, ours=True) | {"compiling": 0, "sm_mhz": [1965, 1980]}
    beside = record_of("hopper", 280, ours=True, case="1x4k") | {"compiling": 3}
    rows = [line for line in table({"sections": {}, "records": [quiet, beside]}).splitlines() if line[:6] == "decode"]
    assert "1965-1980" in rows[0] and "compilers" not in rows[0] and "280.0-280.0 next to compilers" in rows[1]


def record_of(who: str, us: float, *, ours: bool, mode: str = "chained", case: str = "64x4k", size: float = 1073.7e6):
    return dict(
        kind="time",
        metric="decode, blocks of 64",
        case=case,
        who=who,
        ours=ours,
        mode=mode,
        right=True,
        us=us,
        us_low=us,
        us_high=us,
        bytes=size,
    )


def test_the_table_judges_decode_by_the_copy_ceiling_and_the_best_peer():
    copy = dict(kind="value", metric="copy bandwidth", value=4.3, unit="TB/s", bar="", met=None)
    fast = [
        copy,
        record_of("hopper", 280, ours=True),
        record_of("hopper", 320, ours=True, mode="dispatched"),
        record_of("FA3", 275, ours=False, mode="graph"),
        record_of("jax", 400, ours=False),
    ]
    [row] = [line for line in table({"sections": {}, "records": fast}).splitlines() if line.startswith("decode")]
    assert row.split() == [
        "decode,",
        "blocks",
        "of",
        "64",
        "64x4k",
        "hopper",
        "280.0",
        "280.0-280.0",
        "320.0",
        "1073.7",
        "89",
        "FA3",
        "275.0",
        "0.98",
        ">=",
        "85",
        "%,",
        ">=",
        "0.95",
        "of",
        "peer",
        "yes",
    ]
    slow = [copy, record_of("hopper", 300, ours=True)]  # 83 % of the ceiling
    [row] = [line for line in table({"sections": {}, "records": slow}).splitlines() if line.startswith("decode")]
    assert row.endswith("NO")
    tiny = table({"sections": {}, "records": slow, "options": ["--tiny"]})
    assert "NO" not in tiny and "measured nothing" in tiny


def test_sections_import_without_touching_the_device_and_without_heavy_packages():
    """A section's process is started while the one before still measures."""
    script = """
        import importlib, sys
        from experiments.gpu import __main__
        from experiments.gpu.plan import SECTIONS
        for section in SECTIONS:
            importlib.import_module(f"experiments.gpu.sections.{section.module}")
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized()
        heavy = {"omegaconf", "typer", "matplotlib", "orbax", "optax", "torch", "transformers", "sentencepiece"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        import ksana_jax.engine.llm
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=True, timeout=60)


@pytest.mark.soak
def test_the_command_runs_sections_and_prints_the_table_last(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path)}
    command = [sys.executable, "-m", "experiments.gpu", "--tiny", "--only", "environment,kv_write"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: s["status"] for name, s in results["sections"].items()} == {"environment": "ok", "kv_write": "ok"}
    checks = {r["who"]: r["right"] for r in results["records"] if r["kind"] == "check"}
    assert checks == {"XLA scatter": True, "XLA scatter, flat": True}
    [compilers] = [r for r in results["records"] if r.get("name") == "compilers"]
    assert {"ptxas", "cuda_data_dir", "XLA_FLAGS"} <= set(compilers)
    assert (tmp_path / "table.txt").read_text().strip() in done.stdout
    assert len(list(tmp_path.iterdir())) <= 5  # few files: some machines give back no more
    # The bundle is the last line.
    path = Path(done.stdout.splitlines()[-1].rsplit(": ", 1)[1])
    assert path.parent == tmp_path and str(tmp_path) not in path.read_text()
    made = read_report(import_bundle(path))
    [row] = made.rows
    assert row.point == {"metric": "kv write", "case": "16 tokens"} and row.values.keys() == {"peer_us"}
    assert any("measures nothing" in note for note in made.notes)


def test_an_ended_run_still_prints_its_table(tmp_path):
    command = [sys.executable, "-m", "experiments.gpu", "--tiny", "--only", "decode", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    while "--- decode" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=20)
    assert "interrupted" in rest and "decode" in (tmp_path / "table.txt").read_text()


def test_an_unknown_section_is_refused_in_one_line(capsys):
    from experiments.gpu.__main__ import main

    assert main(["--only", "decod"]) == 2
    assert capsys.readouterr().err.startswith("no section 'decod'; sections are environment, correctness")
