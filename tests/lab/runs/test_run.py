"""A run can be killed, resumed, sharded and changed; only what is missing runs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ksana_jax.core.config import ConfigError
from ksana_jax.lab.runs.config import plan
from ksana_jax.lab.runs.records import RecordFile, Shard, locked, read
from ksana_jax.lab.runs.report import report
from ksana_jax.lab.runs.run import run

pytestmark = pytest.mark.usefixtures("fake")
ROOT = Path(__file__).parents[3]
TABLES = ("table.md", "table.csv", "table.tex", "figure.png", "figure.pdf")


def small(model, **fields):
    return {
        "name": "small",
        "task": "fake",
        "model": model,
        "grid": {"settings.x": [1, 2, 3, 4]},
        "seeds": [0, 1],
        **fields,
    }


def lines(folder, kind=None):
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [r for r in records if kind in (None, r["kind"])]


def made_files(folder):
    report(folder)
    return {name: (folder / name).read_bytes() for name in TABLES}


def test_a_second_run_does_nothing_and_leaves_the_records_as_they_are(model, tmp_path):
    experiment = plan(small(model))
    assert run(experiment, tmp_path / "out").num_done == 8
    before = (tmp_path / "out/records.jsonl").read_bytes()
    outcome = run(experiment, tmp_path / "out")
    assert (outcome.num_done, outcome.num_skipped) == (0, 8)
    assert (tmp_path / "out/records.jsonl").read_bytes() == before


def test_interleaved_rows_run_with_one_seed_before_the_next(model, tmp_path):
    variants = [
        {"name": "a", "engine.block_size": 8},
        {"name": "b"},
        {"name": "c", "engine.block_size": 8, "settings.x": 2},
    ]
    for interleave, expected in ((False, "a0 a1 c0 c1 b0 b1"), (True, "a0 b0 c0 a1 b1 c1")):
        folder = tmp_path / str(interleave)
        run(plan(small(model, grid={}, variants=variants, interleave=interleave)), folder)
        assert " ".join(f"{r['label']}{r['seed']}" for r in lines(folder, "start")) == expected


def test_layers_in_several_groups_are_given_to_the_engine_when_it_is_built(model, tmp_path, make_llm):
    path = Path(model, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}))
    layers = [[{}, {}], [{"window": 4}, {}]]
    variants = [{"name": str(given), "layer_patterns": given} for given in layers]
    text = tmp_path / "text.txt"
    text.write_text("0123456789" * 10)
    settings = {"texts": [str(text)], "num_texts": 1, "num_tokens": 64}
    run(plan({"model": model, "settings": settings, "variants": variants}), tmp_path / "out", make_llm=make_llm)
    one, two = make_llm.instances
    assert one.built_with is None and [str(p) for p in two.built_with] == ["window=4", "full"]


def test_a_changed_experiment_keeps_what_has_not_changed(model, tmp_path):
    run(plan(small(model)), tmp_path / "out")
    changed = plan(small(model, name="renamed", grid={"settings.x": [4, 5, 1]}))
    outcome = run(changed, tmp_path / "out")
    assert (outcome.num_done, outcome.num_skipped) == (2, 4)
    assert [row.point["settings.x"] for row in report(tmp_path / "out").rows] == [4, 5, 1]


def test_a_torn_last_line_is_dropped_with_a_warning_and_its_trial_runs_again(model, tmp_path):
    experiment = plan(small(model))
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    run(experiment, whole)
    run(experiment, torn)
    path = torn / "records.jsonl"
    *lines, _table = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines)[:-17])
    with pytest.warns(UserWarning, match=r"incomplete last line \(\d+ bytes\)"):
        outcome = run(experiment, torn)
    assert (outcome.num_done, outcome.num_skipped) == (1, 7)
    assert made_files(torn) == made_files(whole)


def test_records_cut_anywhere_resume_to_the_same_table(model, tmp_path):
    experiment = plan(small(model, grid={"settings.x": [1, 2]}))
    run(experiment, tmp_path / "whole")
    content = (tmp_path / "whole/records.jsonl").read_bytes()
    expected = made_files(tmp_path / "whole")
    for i, cut in enumerate(range(0, len(content), len(content) // 6)):
        folder = tmp_path / f"cut{i}"
        folder.mkdir()
        (folder / "records.jsonl").write_bytes(content[:cut])
        torn = not content[:cut].endswith(b"\n") and cut > 0
        with pytest.warns(UserWarning, match="incomplete") if torn else contextlib.nullcontext():
            run(experiment, folder)
        assert made_files(folder) == expected


def test_a_killed_run_resumes_to_the_bytes_of_an_uninterrupted_one(model, tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps(small(model, settings={"sleep_s": 0.04})))

    def start(folder):
        command = [sys.executable, str(Path(__file__).with_name("fake_task.py")), str(file), str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    killed = tmp_path / "killed"
    with start(tmp_path / "whole") as whole:
        for num_lines in (12, 25):
            path = killed / "records.jsonl"
            with start(killed) as process:
                deadline = time.monotonic() + 20
                while time.monotonic() < deadline and not (
                    path.exists() and path.read_bytes().count(b"\n") >= num_lines
                ):
                    time.sleep(0.005)
                process.send_signal(signal.SIGKILL)
            assert process.returncode == -signal.SIGKILL
            assert not (killed / "table.md").exists()
        with start(killed) as process:
            output, _ = process.communicate(timeout=30)
            assert process.returncode == 0, output
            assert "num_skipped=0" not in output
        output, _ = whole.communicate(timeout=30)
        assert whole.returncode == 0, output
    for name in TABLES:
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_shards_partition_the_trials_and_together_make_the_same_table(model, tmp_path):
    experiment = plan(small(model))
    run(experiment, tmp_path / "whole")
    done = [run(experiment, tmp_path / "parts", Shard(k, 3)).num_done for k in (1, 2, 3)]
    assert (sum(done), max(done) - min(done)) == (8, 1)
    assert made_files(tmp_path / "parts") == made_files(tmp_path / "whole")
    started = [
        json.loads(line)["trial"]
        for path in (tmp_path / "parts").glob("records*.jsonl")
        for line in path.read_text().splitlines()
        if json.loads(line)["kind"] == "start"
    ]
    assert sorted(started) == sorted(t.id for t in experiment.trials)


def test_trials_that_shared_a_machine_are_noted_where_speed_was_measured(model, tmp_path, monkeypatch):
    import fake_task

    from ksana_jax.lab.runs import trials

    machine = {"machine": "a"}
    monkeypatch.setattr(trials, "environment", lambda: machine)
    monkeypatch.setattr(fake_task.Fake, "summarise", lambda self, measurements: {"mean": 1.0, "tokens_per_s": 2.0})
    experiment = plan(small(model))
    run(experiment, tmp_path, Shard(1, 2))
    run(experiment, tmp_path, Shard(2, 2))

    def notes():
        return [note for note in report(tmp_path).notes if "at the same time" in note]

    assert notes() == []
    path = tmp_path / "records.2-of-2.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    earlier = [json.loads(line) for line in (tmp_path / "records.1-of-2.jsonl").read_text().splitlines()]
    begins = [next(line["time"] for line in part if line["kind"] == "start") for part in (earlier, lines)]
    for line in lines:
        if "time" in line:
            line["time"] += begins[0] - begins[1]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert notes() == ["Up to 2 trials shared one machine at the same time, which affects times and speeds."]
    path.write_text(path.read_text().replace('"machine": "a"', '"machine": "b"'))
    assert notes() == []


def test_trials_on_several_kinds_of_machines_are_noted_where_speed_was_measured(model, tmp_path, monkeypatch):
    import fake_task

    from ksana_jax.lab.runs import trials

    def notes():
        return [note for note in report(tmp_path).notes if "kinds of machines" in note]

    monkeypatch.setattr(fake_task.Fake, "summarise", lambda self, measurements: {"tokens_per_s": 2.0})
    monkeypatch.setattr(fake_task.Fake, "columns", lambda self, rows: [])
    machine = {"machine": "a", "device": "cpu", "cpu": "Epyc", "cores": 8}
    monkeypatch.setattr(trials, "environment", lambda: machine)
    run(plan(small(model)), tmp_path, Shard(1, 2))
    machine = {**machine, "machine": "b"}
    run(plan(small(model)), tmp_path, Shard(2, 2))
    assert notes() == []
    machine["cores"] = 4
    run(plan(small(model, grid={"settings.x": [1, 5]})), tmp_path)
    said = "The trials ran on 2 kinds of machines, whose times and speeds differ: "
    assert notes() == [f"{said}cpu, Epyc, 8 cores; cpu, Epyc, 4 cores."]
    monkeypatch.setattr(fake_task.Fake, "summarise", lambda self, measurements: {"mean": 2.0})
    assert notes() == []


def test_a_whole_run_skips_what_shards_have_done(model, tmp_path):
    experiment = plan(small(model))
    run(experiment, tmp_path / "out", Shard(2, 4))
    outcome = run(experiment, tmp_path / "out")
    assert (outcome.num_done, outcome.num_skipped) == (6, 2)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="is not k/n"):
        Shard.parse(text)


@pytest.mark.parametrize(
    ("task", "tasks", "part"), [(0, (0, 3, 4), Shard(1, 4)), (3, (0, 3, 4), Shard(4, 4)), (5, (5, 6, 2), Shard(1, 2))]
)
def test_a_task_of_a_slurm_job_array_has_its_part(task, tasks, part, monkeypatch):
    for name, value in zip(("ID", "MIN", "MAX", "COUNT"), (task, *tasks), strict=True):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))
    assert Shard.parse("slurm") == part
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "9")
    with pytest.raises(ConfigError, match=f"the job array has 9 tasks from {tasks[0]} to {tasks[1]}; give k/n"):
        Shard.parse("slurm")


def test_a_part_of_a_job_array_needs_one(monkeypatch):
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    with pytest.raises(ConfigError, match="no task of a Slurm job array: 'SLURM_ARRAY_TASK_ID' is not set"):
        Shard.parse("slurm")


def test_two_runs_on_one_folder_are_refused_with_the_pid_of_the_first(model, tmp_path):
    experiment = plan(small(model))
    with locked(tmp_path, Shard()), pytest.raises(ConfigError, match=f"in use by a run with pid {os.getpid()}"):
        run(experiment, tmp_path)
    with locked(tmp_path, Shard(1, 2)):
        with pytest.raises(ConfigError, match="in use by a run"):
            run(experiment, tmp_path)
        with pytest.raises(ConfigError, match=f"in use by a run with pid {os.getpid()}"):
            run(experiment, tmp_path, Shard(1, 2))
        assert run(experiment, tmp_path, Shard(2, 2)).num_done == 4
    assert run(experiment, tmp_path).num_skipped == 4


def test_after_a_failed_trial_the_next_one_gets_an_engine_of_its_own(model, tmp_path, monkeypatch):
    import fake_task
    from fake_llm import FakeLLM

    engines = []

    def fail_second(self, trial):
        engines.append(trial.llm)
        if len(engines) == 2:
            raise RuntimeError("and requests are left behind")
        yield {"metric": "value", "value": 1.0}

    monkeypatch.setattr(fake_task.Fake, "run", fail_second)
    outcome = run(plan(small(model)), tmp_path / "out", make_llm=FakeLLM)
    assert len(outcome.failed) == 1
    assert engines[0] is engines[1] and engines[1] is not engines[2] and engines[2] is engines[-1]


def test_a_failing_trial_is_recorded_and_the_others_go_on(model, tmp_path):
    failing = small(model, settings={"fail_at": 2})
    outcome = run(plan(failing), tmp_path / "out")
    assert (outcome.num_done, len(outcome.failed)) == (6, 2)
    assert outcome.failed["x=2, seed 1"] == "RuntimeError: x is 2"
    made = report(tmp_path / "out")
    assert len(made.failed) == 2
    assert "| 2 | — | — |" in (tmp_path / "out/table.md").read_text()
    assert "6 of 8 trials are done; 2 failed, the first with RuntimeError: x is 2." in made.notes
    assert len(run(plan(failing), tmp_path / "out").failed) == 2  # tried again
    with pytest.raises(RuntimeError, match="x is 2"):
        run(plan(failing), tmp_path / "out", debug=True)


def test_a_table_is_not_lost_to_its_figure(model, tmp_path, monkeypatch, capsys):
    import fake_task

    from ksana_jax.lab.runs.command import report_and_show

    def fails(self, figure, rows):
        # What a user reads is printed by now.
        assert "mean" in capsys.readouterr().out
        assert (tmp_path / "table.md").exists()
        raise ZeroDivisionError("no\naxis")

    run(plan(small(model)), tmp_path)
    report(tmp_path)
    (tmp_path / "table.md").unlink()
    monkeypatch.setattr(fake_task.Fake, "draw", fails)
    with pytest.warns(UserWarning, match="figure not drawn: ZeroDivisionError: no axis"):
        report_and_show([tmp_path])
    assert "table.tex, records.jsonl" in capsys.readouterr().out
    # A figure of other records would be believed.
    assert not list(tmp_path.glob("figure.*"))


def test_records_say_what_made_them(model, tmp_path):
    run(plan(small(model)), tmp_path)
    start = lines(tmp_path, "start")[0]
    assert start["config"]["settings"]["x"] == 1
    assert start["environment"] == {"device": "none"}
    assert all(r["schema_version"] == 1 for r in lines(tmp_path))
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["experiment"]["grid"] == {"settings.x": [1, 2, 3, 4]}
    assert len(content["trials"]) == 8
    assert not list(tmp_path.glob(".run.json*"))


def test_the_environment_names_commit_versions_and_device():
    from ksana_jax.lab.runs.environment import environment

    found = environment()
    assert {"commit", "dirty", "python", "packages", "device", "cores", "xla_flags"} <= found.keys()
    assert found["packages"]["jax"]
    json.dumps(found)


def test_a_line_that_is_no_record_is_named(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"schema_version": 1, "kind": "start", "trial": "a"}\nnot json\n')
    with pytest.raises(ConfigError, match=r"records.jsonl line 2 is not a record: b'not json"):
        read(tmp_path)
    (tmp_path / "records.jsonl").write_text('{"schema_version": 99, "kind": "plan"}\n')
    with pytest.raises(ConfigError, match="line 1 has schema_version 99, this version reads 1"):
        read(tmp_path)


def test_every_line_is_on_disk_as_soon_as_it_is_appended(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    file.append("plan", time=0)
    assert (tmp_path / "records.jsonl").read_bytes().endswith(b"}\n")
    file.close()


@pytest.mark.parametrize("name", [".lock", "records.jsonl"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_link_or_a_fifo_in_the_output_folder_is_refused_and_nothing_is_written_through_it(
    model, tmp_path, name, kind
):
    outside, folder = tmp_path / "outside", tmp_path / "out"
    outside.write_text("precious")
    folder.mkdir()
    (folder / name).symlink_to(outside) if kind == "link" else os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=rf"{name} is a (link|FIFO), must be a plain file"):
        run(plan(small(model)), folder)
    if (kind, name) == ("fifo", "records.jsonl"):
        with pytest.raises(ConfigError, match="is a FIFO, must be a plain file"):
            report(folder)
    assert outside.read_text() == "precious"


def test_a_table_replaces_a_link_of_its_name_and_not_what_it_leads_to(model, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("precious")
    run(plan(small(model)), tmp_path / "out")
    for name in ("table.md", f".table.csv.{os.getpid()}"):
        (tmp_path / "out" / name).symlink_to(outside)
    report(tmp_path / "out")
    assert outside.read_text() == "precious"
    assert (tmp_path / "out/table.md").read_text().startswith("## small")
    assert (tmp_path / "out/table.csv").read_text().startswith("row,")
