"""`python -m experiments.gpu`: what can be shown without a GPU."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gpu import candidates, cases, driver, plan, timing
from experiments.gpu.context import RESTART, Context, read_records
from experiments.gpu.race import Entry, race
from experiments.gpu.sections import correctness
from experiments.gpu.table import table
from pallas_kernels.patterns import FAR, Pattern

ROOT = Path(__file__).parents[2]

# A section without jax: its name says what it does.
FAKE = """
import json, os, signal, sys, time
records, name = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--records", "--child"))
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
print("done with", name)
"""


def fake_run(tmp_path: Path, names: list[str], total_s: float = 60.0, most_s: int = 10) -> dict:
    """What the driver makes of fake sections."""
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
    assert results["sections"]["has a faulty kernel"]["status"] == "ok, 1 times begun anew after a kernel's fault"
    assert [r["value"] for r in results["records"]] == [0, 1]


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
        context = Context("decode", Path(sys.argv[1]), time.monotonic() + 60)
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


def make_context(tmp_path: Path, section: str = "decode") -> Context:
    return Context(section, tmp_path / "records.jsonl", time.monotonic() + 300, tiny=True, folder=tmp_path)


def test_rounds_go_to_and_fro_and_drop_who_fails():
    asked = []

    def sampler(name, seconds):
        def sample():
            asked.append(name)
            if name == "b" and asked.count("b") == 2:
                raise RuntimeError("gone")
            return seconds

        return sample

    times, failed = timing.rounds({"a": sampler("a", 1.0), "b": sampler("b", 2.0), "c": sampler("c", 3.0)}, count=3)
    assert asked == ["a", "b", "c", "c", "b", "a", "a", "c"]
    assert times["a"].rounds == (1.0,) * 3 and set(times) == {"a", "c"} and str(failed["b"]) == "gone"


def test_a_chain_feeds_each_call_with_the_one_before_and_goes_through_the_layers():
    run = timing.chain(lambda carry, shared, own: carry * shared + own, 3)
    assert int(run(jnp.int32(1), jnp.int32(10), (jnp.int32(1), jnp.int32(2)))) == 1121  # ((1*10+1)*10+2)*10+1


def test_decode_shapes_have_the_bytes_of_the_plan():
    megabytes = {case.name: round(case.bytes / 1e6, 1) for case in cases.decode_cases(64, tiny=False)}
    assert megabytes == {
        "1x4k": 16.8, "1x32k": 134.2, "8x8k": 268.4, "32x4k": 536.9, "64x4k": 1073.7, "256x512": 536.9,
        "1x128k+31x4k": 1057.0,
    }  # fmt: skip
    for case in cases.decode_cases(16, tiny=False):
        assert case.num_layers * case.bytes >= cases.ROTATED_BYTES  # nothing is found in the L2


def test_arguments_are_of_the_shapes_that_programs_are_compiled_for():
    for case in (
        cases.Case("a", (40, 7), 16, 4, 2, 64, tiny=True),
        cases.Case("b", (70,), 16, 4, 2, 64, queries=32, prefill=True, tiny=True),
        cases.Case("c", (56, 56), 16, 4, 2, 64, shared=32, tiny=True),
    ):
        a = case.arguments()
        assert [(x.shape, x.dtype) for x in a] == [(x.shape, x.dtype) for x in case.shapes()]
        assert int((a.starts < FAR).sum(axis=1)[0]) == case.blocks_of(case.lengths[0])
    tables = np.asarray(a.tables)
    assert (tables[0, :2] == tables[1, :2]).all() and tables[0, 2:].tolist() != tables[1, 2:].tolist()
    windowed = cases.Case("d", (32768,), 64, pattern=tuple(Pattern(window=1024, num_sinks=4)))
    assert windowed.visible() == 1028


def test_comparison_finds_one_wrong_row_nan_and_a_wrong_log_sum_exp():
    right = jnp.asarray(np.random.default_rng(0).standard_normal((3, 1, 4, 64)), jnp.float32)
    lse = jnp.zeros((3, 1, 4)).at[2].set(-jnp.inf)
    assert correctness.compare((right, lse), (right, lse))["right"]
    assert correctness.compare(right.astype(jnp.bfloat16), right)["right"]
    wrong_row = right.at[0, 0, 0].multiply(1.05)
    assert not correctness.compare(wrong_row, right)["right"]
    assert not correctness.compare(right.at[0, 0, 0, 0].set(jnp.nan), right)["right"]
    for bad in (lse.at[0].set(0.1), lse.at[0].set(-jnp.inf), lse.at[2].set(0.0), lse.at[1].set(jnp.nan)):
        assert not correctness.compare((right, bad), (right, lse))["right"]
    assert not correctness.compare(right, (right, lse))["right"]


def test_a_wrong_candidate_is_timed_but_marked_and_one_that_cannot_run_is_reported(tmp_path, capsys):
    context = make_context(tmp_path)
    case = cases.Case("2x40", (40, 33), 16, 4, 2, 64, tiny=True)

    def wrong(q, *args, **keywords):
        return candidates.reference()(q, *args, **keywords) * 1.1

    def lacking(*args, **keywords):
        raise NotImplementedError("a head dim of 64")

    tried = [
        candidates.ours_as(n, f, case)
        for n, f in (("good", candidates.reference()), ("bad", wrong), ("lacks", lacking))
    ]
    measured = race(context, "decode, blocks of 64", [Entry(case, tried)])
    assert {who for _, who, _ in measured} == {"good", "bad"}
    records = read_records(context.records)
    assert {r["who"]: r["right"] for r in records if r["kind"] == "check"} == {"good": True, "bad": False}
    [failure] = [r for r in records if r["kind"] == "failed"]
    assert failure["unsupported"] and failure["who"] == "lacks"
    results = {"sections": {}, "records": records}
    [row] = [line for line in table(results).splitlines() if line.startswith("decode")]
    assert "good" in row and "WRONG" not in row
    only_bad = {"sections": {}, "records": [r for r in records if r.get("who") != "good"]}
    assert "bad (WRONG)" in table(only_bad)
    # Begun anew after a fault, it measures nothing twice.
    assert race(context, "decode, blocks of 64", [Entry(case, tried)]) == measured


def record_of(who: str, us: float, *, ours: bool, mode: str = "chained", case: str = "64x4k", size: float = 1073.7e6):
    return dict(kind="time", metric="decode, blocks of 64", case=case, who=who, ours=ours, mode=mode, right=True, us=us,
                us_low=us, us_high=us, bytes=size)  # fmt: skip


def test_the_table_judges_decode_by_the_copy_ceiling_and_the_best_peer():
    copy = dict(kind="value", metric="copy bandwidth", value=4.3, unit="TB/s", bar="", met=None)
    fast = [copy, record_of("hopper", 280, ours=True), record_of("hopper", 320, ours=True, mode="dispatched"),
            record_of("FA3", 275, ours=False, mode="graph"), record_of("jax", 400, ours=False)]  # fmt: skip
    [row] = [line for line in table({"sections": {}, "records": fast}).splitlines() if line.startswith("decode")]
    assert row.split() == [
        "decode,", "blocks", "of", "64", "64x4k", "hopper", "280.0", "280.0-280.0", "320.0", "1073.7", "89", "FA3",
        "275.0", "0.98", ">=", "85", "%,", ">=", "0.95", "of", "peer", "yes",
    ]  # fmt: skip
    slow = [copy, record_of("hopper", 300, ours=True)]  # 83 % of the ceiling
    [row] = [line for line in table({"sections": {}, "records": slow}).splitlines() if line.startswith("decode")]
    assert row.endswith("NO")
    tiny = table({"sections": {}, "records": slow, "options": ["--tiny"]})
    assert "NO" not in tiny and "measured nothing" in tiny


def test_sections_import_without_touching_the_device_and_without_heavy_packages():
    """A section's process is started while the one before still measures."""
    script = """
        import importlib, sys
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


def test_the_command_runs_sections_and_prints_the_table_last(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path)}
    command = [sys.executable, "-m", "experiments.gpu", "--tiny", "--only", "environment,kv_write"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {name: s["status"] for name, s in results["sections"].items()} == {"environment": "ok", "kv_write": "ok"}
    checks = {r["who"]: r["right"] for r in results["records"] if r["kind"] == "check"}
    assert checks == {"XLA scatter": True, "XLA scatter, flat": True}
    assert (tmp_path / "table.txt").read_text().strip() in done.stdout
    assert len(list(tmp_path.iterdir())) <= 5  # few files: some machines give back no more


def test_an_ended_run_still_prints_its_table(tmp_path):
    command = [sys.executable, "-m", "experiments.gpu", "--tiny", "--only", "tuning", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    while "--- tuning" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=20)
    assert "interrupted" in rest and "tuning" in (tmp_path / "table.txt").read_text()


def test_an_unknown_section_is_refused_in_one_line(capsys):
    from experiments.gpu.__main__ import main

    assert main(["--only", "decod"]) == 2
    assert capsys.readouterr().err.startswith("no section 'decod'; sections are environment, ceilings")
