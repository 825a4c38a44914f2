"""Bundles of measurements on a GPU: what a run puts into one, and how it becomes the records of a folder."""

import copy
import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.gpu import bundle, measured
from experiments.gpu.context import read_records
from experiments.gpu.importing import MAX_BYTES, import_bundle
from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.report import read_report

ROOT = Path(__file__).parents[3]
STARTED = "2026-11-26T09:30:00Z"


def time_of(who="hopper_decode", us=260.0, *, ours=True, mode="chained", right=True, case="64x4k"):
    return {
        "section": "decode", "kind": "time", "metric": "decode, blocks of 64", "case": case, "who": who, "ours": ours,
        "mode": mode, "right": right, "us": us, "us_low": us, "us_high": us, "bytes": 1073741824,
    }  # fmt: skip


def results_of(*records, options=()):
    facts = [
        {"kind": "fact", "name": "device", "device_kind": "NVIDIA H200"},
        {"kind": "fact", "name": "nvidia-smi", "answer": "name, driver_version\nNVIDIA H200, 580.159.04, 143771 MiB"},
        {"kind": "fact", "name": "packages", "section": "environment", "jax": "0.11.2", "torch": None},
        {"kind": "value", "metric": "copy bandwidth", "value": 4.0},
    ]
    sections = {"decode": {"status": "ok", "seconds": 60.0, "last_lines": ["/home/anna/secret.py"]}}
    return {"started": STARTED, "options": list(options), "sections": sections, "records": [*facts, *records]}


@pytest.fixture
def written(tmp_path):
    """Writes the bundle of records; returns its path."""
    return lambda *records, **more: bundle.write(results_of(*records, **more), tmp_path)


def rows_of(folder):
    rows = read_report(folder).rows
    return {(row.point["case"], row.label): {key: values[0] for key, values in row.values.items()} for row in rows}


def test_a_bundle_is_shown_as_a_table_and_imported_beside_other_runs(written, tmp_path, run_ksana):
    path = written(time_of(), time_of("cuDNN paged", 250.0, ours=False), time_of(us=275.0, mode="dispatched"))
    assert path.name == "gpu-nvidia-h200-20261126T093000Z.json"
    folder = import_bundle(path)
    code, out, _ = run_ksana("report", folder)
    assert code == 0
    assert "NVIDIA H200, driver 580.159.04, jax 0.11.2, 2026-11-26" in out and "260.0" in out and "0.96" in out
    assert folder == path.with_suffix("")
    assert {"records.jsonl", "table.md", "figure.png"} <= {p.name for p in folder.iterdir()}
    other = bundle.write({**results_of(time_of(us=300.0)), "started": "2026-11-27T09:30:00Z"}, tmp_path)
    assert run_ksana("report", folder, import_bundle(other), "--out", tmp_path / "both")[0] == 0
    table = (tmp_path / "both" / "table.md").read_text()
    assert f"{folder.name}: hopper_decode" in table and f"{other.stem}: hopper_decode" in table
    assert run_ksana("report", folder, "--csv")[0] == 0


def test_the_fastest_right_candidate_of_each_side_counts(written):
    path = written(
        time_of("fast but wrong", 100.0, right=False),
        time_of("slow", 400.0),
        time_of(us=256.0),
        time_of("one by one", 10.0, mode="dispatched"),
        time_of("merge alone", 5.0, mode="part"),
        time_of("wrong peer", 50.0, ours=False, right=False),
        time_of("peer", 320.0, ours=False, mode="graph"),
        {"kind": "step", "case": "1 rows", "mode": "device", "us": 4500.0, "us_low": 4400.0, "us_high": 4600.0},
        {"kind": "step", "case": "1 rows", "mode": "runner", "us": 450.0, "us_low": 440.0, "us_high": 460.0},
    )
    folder = import_bundle(path)
    rows = rows_of(folder)
    assert set(rows) == {("64x4k", "hopper_decode"), ("1 rows", "device")}
    decode = rows["64x4k", "hopper_decode"]
    assert decode["of_copy"] == pytest.approx(100 * 1073741824 / 256e-6 / 4e12)
    assert (decode["us"], decode["peer_us"], decode["peer_ratio"]) == (256.0, 320.0, 1.25)
    assert rows["1 rows", "device"]["us"] == 4500.0
    [note] = [note for note in read_report(folder).notes if "Wrong" in note]
    assert "fast but wrong (decode" in note and "wrong peer" in note and "slow" not in note


def test_the_records_of_the_h200_make_a_bundle(tmp_path):
    results = {"started": STARTED, "options": [], "sections": {}, "records": read_records(measured.RECORDS)}
    path = bundle.write(results, tmp_path)
    made = json.loads(path.read_text())
    assert (made["device"], made["driver"], made["ptxas"]) == ("NVIDIA H200", "580.159.04", "13.5")
    assert len(made["records"]) == len(results["records"]) and made["packages"]["jax"] == "0.11.2"
    rows = rows_of(import_bundle(path))
    assert rows["64x4k", "hopper_decode"]["us"] == pytest.approx(260.0, abs=0.1)


def test_no_path_host_or_user_is_in_a_bundle(written, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "gpu17.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "anna")
    reasons = [
        "FileNotFoundError: '/home/anna/models/x.bin'; see https://example.com/help/page",
        "--xla_dump_to=/scratch/anna/dump,file:///opt/site/lib/run.py: on gpu17.example.org (gpu17) as anna: 3 rows/s",
    ]
    compilers = {
        "kind": "fact", "name": "compilers", "mosaic": "/home/anna/env/bin/ptxas",
        "ptxas": {"/home/anna/env/bin/ptxas": ["Build cuda_13.5.r13.5/c"], "/usr/local/bin/ptxas": ["cuda_13.0.r13.0"]},
    }  # fmt: skip
    failed = [{"kind": "failed", "who": "hopper", "case": "1x4k", "reason": reason} for reason in reasons]
    machine = {
        "kind": "fact",
        "name": "environment",
        "machine": "5bce98f7",
        "platform": "Linux-6-anna",
        "cpu": "a Xeon",
    }
    path = written(time_of("hopper anna", us=1.0), compilers, machine, *failed)
    made = json.loads(path.read_text())
    assert made["ptxas"] == "13.5"
    [compilers] = [r for r in made["records"] if r.get("name") == "compilers"]
    assert compilers["mosaic"] == "…/ptxas" and len(compilers["ptxas"]) == 2
    first, second = (r["reason"] for r in made["records"] if r["kind"] == "failed")
    assert first == "FileNotFoundError: '…/x.bin'; see https://example.com/help/page"
    assert second == "--xla_dump_to=…,…/run.py: on … (…) as …: 3 rows/s"
    # A candidate's name is no user's.
    assert path.read_text().count("anna") == 1 and "hopper anna" in path.read_text()
    assert not any(word in path.read_text() for word in ("/home", "gpu17", "/usr", "5bce98f7", "Linux"))


def test_an_import_is_repeated_but_replaces_no_other_records(written, tmp_path):
    path = written(time_of())
    folder = import_bundle(path)
    before = (folder / "records.jsonl").read_bytes()
    assert import_bundle(path) == folder and (folder / "records.jsonl").read_bytes() == before
    written(time_of(us=300.0))
    with pytest.raises(ConfigError, match=r"has records of another run than gpu-.*: name a folder"):
        import_bundle(path)
    assert (folder / "records.jsonl").read_bytes() == before
    assert import_bundle(path, tmp_path / "new").name == "new"


def test_a_tiny_run_says_that_it_measured_nothing(written):
    notes = read_report(import_bundle(written(time_of(), options=["--tiny"]))).notes
    assert any("tries the code and measures nothing" in note for note in notes)


def changed(made, *keys, value):
    made = copy.deepcopy(made)
    *outer, last = keys
    inner = made
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return json.dumps(made)


BROKEN = {
    "text": (lambda made: "hello", "JSONDecodeError"),
    "NaN": (lambda made: changed(made, "copy_bytes_per_s", value=float("nan")), "NaN is no number of JSON"),
    "list": (lambda made: "[]", "it has no kind 'ksana gpu measurements'"),
    "deep": (lambda made: "[" * 100_000, "RecursionError"),
    "version": (lambda made: changed(made, "schema_version", value=2), "schema_version 2, this version reads 1"),
    "device": (lambda made: changed(made, "device", value=7), "'device' is 7"),
    "started": (lambda made: changed(made, "started", value="now"), "'started' is 'now', not a time such as"),
    "none": (lambda made: changed(made, "records", value=[{"kind": "fact"}]), "of its 1 records none is the time"),
    "record": (lambda made: changed(made, "records", 4, value=3), "record 4: 3 is not an object"),
    "us": (lambda made: changed(made, "records", 4, "us", value=-1), "record 4: 'us' is -1, must be between"),
    "huge": (lambda made: changed(made, "records", 4, "us", value=10**400), "record 4: 'us' is 1000"),
    "true": (lambda made: changed(made, "records", 4, "us", value=True), "record 4: 'us' is True"),
    "bytes": (lambda made: changed(made, "records", 4, "bytes", value=-5), "record 4: 'bytes' is -5"),
    "who": (lambda made: changed(made, "records", 4, "who", value=None), "record 4: 'who' is None"),
    "large": (lambda made: " " * (MAX_BYTES + 1), "it has more than 64 MiB"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_bundle_gets_one_sentence_and_writes_nothing(written, name):
    path = written(time_of())
    broken, reason = BROKEN[name]
    path.write_text(broken(json.loads(path.read_text())))
    command = [sys.executable, "-m", "experiments.gpu.importing", str(path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 1 and said.stdout == ""
    assert said.stderr.startswith(f"{path} is not a bundle of `python -m experiments.gpu`: ") and reason in said.stderr
    assert said.stderr.count("\n") == 1 and not path.with_suffix("").exists()
