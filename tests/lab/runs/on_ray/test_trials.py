"""Trials on a Ray cluster give the records of a local run, whatever becomes of workers and nodes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.engine.distributed import ray_connection
from ksana_jax.engine.distributed.ray_places import Resources
from ksana_jax.lab.runs import on_ray as on_ray_module
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.on_ray import RayTrials
from ksana_jax.lab.runs.records import Shard, read
from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run

# Ray starts the processes of a node by forking this one, in which the local run has started jax.
pytestmark = [
    pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]
SECONDS = 30  # until something has to have happened


@pytest.fixture
def watched(tmp_path):
    """Returns plans of four trials, x of 1 and 2 with two seeds, of the task in `watched.py`."""
    seen = tmp_path / "seen"
    seen.mkdir()

    def make(**settings):
        settings = {"folder": str(seen), **settings}
        return plan({"task": "watched:Watched", "settings": settings, "grid": {"settings.x": [1, 2]}, "seeds": [0, 1]})

    make.seen = seen
    return make


@pytest.fixture
def on_ray(ray, tmp_path):
    """Runs a plan on the cluster, into a folder."""

    def run_there(experiment, folder="out", **settings):
        executor = RayTrials(experiment, ray, settings.pop("resources", Resources()), settings.get("debug", False))
        return run(experiment, tmp_path / folder, executor=executor, **settings)

    return run_there


def lines(folder, kind=None):
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [r for r in records if kind in (None, r["kind"])]


def apart_from_times(folder):
    """Records by trial, in their order, without what a second run of the same trial measures anew."""
    found = {}
    for record in lines(folder):
        if "trial" in record and record.get("metric") not in ("speed", "compilations"):
            anew = ("time", "seconds", "load", "summary", "environment", "error")
            kept = {k: v for k, v in record.items() if k not in anew}
            found.setdefault(record["trial"], []).append(kept)
    return found


@contextmanager
def running(seen, function, *arguments, **settings):
    """Calls a function in a thread; at the end, lets trials that wait go on and yields, as a future, its result."""
    with ThreadPoolExecutor(1) as pool:
        try:
            yield (called := pool.submit(function, *arguments, **settings))
        finally:
            (seen / "go").touch()
        called.result()


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_records_and_tables_are_those_of_a_local_run(on_ray, nodes, tmp_path):
    settings = {"num_texts": 1, "num_tokens": 128}
    experiment = plan({"settings": settings, "grid": {"pattern.window": [32, 64]}, "seeds": [0, 1]})
    ended = []
    outcome = on_ray(experiment, on_end=ended.append)
    assert (outcome.num_done, outcome.num_skipped, outcome.failed) == (4, 0, {})
    run(experiment, tmp_path / "here")
    here, there = (apart_from_times(tmp_path / name) for name in ("here", "out"))
    assert here == there and all(len(records) > 3 for records in here.values())
    tables = [report(tmp_path / name) for name in ("here", "out")]
    numbers = [[{k: v for k, v in row.values.items() if k.startswith("ppl")} for row in made.rows] for made in tables]
    assert numbers[0] == numbers[1] and all(numbers[0])
    assert [e.num_ended for e in ended] == [1, 2, 3, 4] and all(e.measurements for e in ended)
    starts = lines(tmp_path / "out", "start")
    flags = {start["environment"]["xla_flags"] for start in starts}  # the engine's default, and a node's own
    assert flags == {"--xla_cpu_use_fusion_emitters=false", nodes.FLAG}
    assert {start["environment"]["backend"] for start in starts} == {"cpu"}
    about = json.loads((tmp_path / "out/run.json").read_text())["environment"]
    assert about["places"] == [{"num_cpus": 1, "num_gpus": 0}] * 2
    # Both nodes are this machine.
    assert read(tmp_path / "out").num_at_once == 2


def test_only_what_is_missing_runs(on_ray, watched, tmp_path):
    experiment = watched()
    first = on_ray(experiment, shard=Shard(1, 2))
    second = on_ray(experiment)
    assert (first.num_done, second.num_done, second.num_skipped) == (2, 2, 2)
    before = (tmp_path / "out/records.jsonl").read_bytes()
    assert on_ray(experiment).num_skipped == 4
    assert (tmp_path / "out/records.jsonl").read_bytes() == before
    assert len(list(watched.seen.iterdir())) == 4
    saved = [m["array"] for m in lines(tmp_path / "out", "measurement")]
    assert all(np.load(tmp_path / "out" / name)["x"].tolist() == [0, 1, 2] for name in saved)


def test_a_killed_workers_trial_is_done_by_another(on_ray, watched, tmp_path):
    labels = []
    with (
        pytest.warns(UserWarning, match="x=1: its worker on .* was lost; another runs it"),
        running(watched.seen, on_ray, watched(wait_at=1), on_progress=lambda *told: labels.append(told[2])) as outcome,
    ):
        until(lambda: len(list(watched.seen.glob("1-*"))) == 2)  # one on each node
        os.kill(pid_of(next(watched.seen.glob("1-0.*"))), signal.SIGKILL)
        until(lambda: len(list(watched.seen.glob("1-0.*"))) == 2)
    assert (outcome.result().num_done, outcome.result().failed) == (4, {})
    out = tmp_path / "out"
    assert len(lines(out, "start")) == len(lines(out, "measurement")) == len(lines(out, "done")) == 4
    assert "x=1 and 1 more" in labels


def test_trials_of_a_lost_node_are_done_by_others_and_a_new_node_is_used(on_ray, watched, nodes, tmp_path):
    with (
        pytest.warns(UserWarning, match="was lost; another runs it"),
        running(watched.seen, on_ray, watched(wait_at=1)) as outcome,
    ):
        until(lambda: len(list(watched.seen.glob("1-*"))) == 2)
        nodes.replace_second()
        # The first node's trial still waits: it is the new node that begins the lost one.
        until(lambda: len(list(watched.seen.glob("1-*"))) == 3)
    assert (outcome.result().num_done, outcome.result().failed) == (4, {})
    assert nodes.FLAG in {start["environment"]["xla_flags"] for start in lines(tmp_path / "out", "start")}


def test_failing_trials_are_recorded_and_the_others_go_on(on_ray, watched, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray_module, "MAX_RETRIES", 1)
    experiment = plan({**watched(fail_at=2, die_at=3).source, "grid": {"settings.x": [1, 2, 3]}, "seeds": [0]})
    with pytest.warns(UserWarning, match="x=3: its worker on .* was lost"):
        outcome = on_ray(experiment)
    assert outcome.num_done == 1 and len(outcome.failed) == 2
    assert outcome.failed["x=2, seed 0"] == "RuntimeError: x is 2"
    assert "its worker process ended 2 times, killed, crashed or out of memory" in outcome.failed["x=3, seed 0"]
    # An error is no reason for another attempt, a lost worker is.
    assert [len(list(watched.seen.glob(f"{x}-*"))) for x in (1, 2, 3)] == [1, 1, 2]
    assert sorted(report(tmp_path / "out").failed.values()) == sorted(outcome.failed.values())


def test_other_inputs_on_a_node_end_the_run_with_its_name(on_ray, watched, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 16}')
    experiment = plan({**watched().source, "model": str(model)})
    (model / "config.json").write_text('{"max_position_embeddings": 32}')
    with pytest.raises(ConfigError, match=r"^node \S+: x=\d: other contents here than where the command runs: model"):
        on_ray(experiment)
    assert not list(watched.seen.iterdir())


def test_code_that_a_node_does_not_have_is_named(on_ray, watched, monkeypatch):
    absent = types.ModuleType("absent")
    absent.TrialRunner = type("TrialRunner", (on_ray_module.TrialRunner,), {"__module__": "absent"})
    monkeypatch.setitem(sys.modules, "absent", absent)
    monkeypatch.setattr(on_ray_module, "TrialRunner", absent.TrialRunner)
    with pytest.raises(ConfigError, match="cannot be imported there: No module named 'absent'"):
        on_ray(watched())


def test_ctrl_c_keeps_what_is_done(nodes, watched, on_ray, tmp_path):
    experiment, file, out = watched(wait_at=2), tmp_path / "sweep.yaml", tmp_path / "out"
    file.write_text(json.dumps(experiment.source))
    command = [sys.executable, "-m", "ksana_jax", "run", str(file), "--out", str(out)]
    command += ["--on", "ray", "--ray-address", nodes.address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            until(lambda: len(list(watched.seen.iterdir())) == 4)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "ksana: interrupted; repeat the command to resume"
    assert "Traceback" not in errors
    waiting = [pid_of(path) for path in watched.seen.glob("2-*")]
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in waiting))
    assert (on_ray(experiment).num_done, on_ray(experiment).num_skipped) == (2, 4)


def test_an_address_where_no_cluster_is_gives_one_line_soon(monkeypatch):
    began = time.monotonic()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        asked = subprocess.run(
            [sys.executable, "-m", "ksana_jax", "run", "quickstart", "--on", "ray", "--ray-address", address],
            capture_output=True,
            text=True,
            timeout=60,
        )
    *_, error = asked.stderr.splitlines()  # below what would run
    assert asked.returncode == 2 and asked.stderr.count("error") == 1
    assert error.startswith(f"ksana: error: Ray at {address}: [Errno 111] Connection refused")
    assert time.monotonic() - began < 15


def test_what_answers_but_is_no_cluster_gives_one_line(monkeypatch):
    monkeypatch.setattr(ray_connection, "ANSWER_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^Ray at {address}: no cluster answers there within 1 s$"):
            ray_connection._check_answers(address)


def pid_of(path):
    return int(path.suffix[1:])
