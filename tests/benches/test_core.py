"""The common part of benchmarks, with benchmarks that measure nothing and clocks that stand still."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench import command, core
from ksana_jax.lab.bench.core import Bench, Case, Unavailable, option
from ksana_jax.lab.runs.machine_load import Compilations, Load
from ksana_jax.lab.runs.report import read_report
from ksana_jax.lab.runs.tasks.results import Column


@dataclasses.dataclass
class Toy(Bench):
    """Measures what it is given."""

    sizes: tuple[int, ...] = option((1, 2), "numbers")

    def title(self):
        return "toy"

    def cases(self):
        return [Case("", {"size": n}) for n in self.sizes]

    def start(self):
        self.asked, self.given = [], {1: iter([9.0, 3.0, 1.0, 2.0]), 2: iter([9.0, 30.0, 10.0, 20.0])}

    def measure(self, case):
        self.asked.append(case.point["size"])
        return {"work_s": next(self.given[case.point["size"]]), "words": "not a number"}

    def columns(self, rows):
        return [Column("work_s", "work", str), core.spread("work_s")]


@dataclasses.dataclass
class Missing(Toy):
    """Has no second case."""

    def measure(self, case):
        if case.point["size"] == 2:
            raise Unavailable("size 2 is not here: make it")
        return super().measure(case)


def test_rows_take_turns_forwards_and_backwards_and_have_medians():
    bench = Toy()
    records, _ = core.run(bench, repeats=3)
    assert bench.asked == [1, 2, 1, 2, 2, 1, 1, 2]  # the first two warm up
    first, second = command.report_of(bench, records).rows
    assert first.values["work_s"] == [2.0] and second.values["work_s"] == [20.0]
    assert first.values["work_s_spread"] == [(3.0 - 1.0) / 2.0]
    assert "words" not in first.values and "seconds" not in first.values


def test_a_folder_of_a_benchmark_is_read_like_that_of_an_experiment(tmp_path, capsys):
    command.run_and_show(Toy(), repeats=3, out=tmp_path, as_json=True)
    *_, last = capsys.readouterr().out.splitlines()
    assert [r["work_s"] for r in json.loads(last)["results"]] == [2.0, 20.0]
    made = read_report(tmp_path)
    assert (made.name, [row.point["size"] for row in made.rows]) == ("bench-test-core", [1, 2])
    assert [row.mean("work_s") for row in made.rows] == [2.0, 20.0]
    assert any("No compilation after a warm-up of " in note for note in made.notes)
    assert any("cores; Python" in note for note in made.notes)
    for name in ("table.md", "table.csv", "figure.png", "records.jsonl"):
        assert (tmp_path / name).stat().st_size
    # A second run replaces the records of the first.
    command.run_and_show(Toy(), repeats=1, out=tmp_path, as_json=False)
    assert [row.mean("work_s") for row in read_report(tmp_path).rows] == [3.0, 30.0]


def test_what_is_absent_is_a_row_that_says_so():
    bench = Missing()
    made = command.report_of(bench, core.run(bench, repeats=2)[0])
    assert [row.mean("work_s") for row in made.rows] == [2.0, None]
    assert made.notes[0] == "size 2: size 2 is not here: make it."


def measured(turn, work_s, compilations=0, load=0.0):
    kept = {"metric": "repetition", "turn": turn, "compilations": compilations, "load": load, "seconds": 1.0}
    return kept | {"work_s": work_s}


def test_a_time_that_contains_a_compilation_is_left_out():
    turns = [measured(0, 1.0), measured(1, 100.0, compilations=2), measured(2, 3.0)]
    assert Toy().summarise(turns)["work_s"] == 2.0
    assert Toy().summarise(turns[1:2]) == {}


def test_a_busy_machine_is_told():
    def notes(loads):
        turns = [measured(i, 1.0, load=load) for i, load in enumerate(loads)]
        rows = [core_row(turns)]
        return " ".join(Toy().notes(rows))

    def core_row(turns):
        from ksana_jax.lab.runs.tasks.results import ResultRow

        return ResultRow("", {"size": 1}, 1, [turns], {})

    assert "took 1% of the processors' time, at worst 2%" in notes([0.0, 0.02])
    assert "busy machine" not in notes([0.0, 0.02])
    assert "took 30%" in notes([0.1, 0.5]) and "That is a busy machine" in notes([0.1, 0.5])
    assert "is not known" in notes([None])


def test_the_load_is_what_others_took_of_the_time_that_processors_were_there(monkeypatch):
    times = iter([(10.0, 100.0), (10.0, 100.02), (13.0, 104.0), (13.5, 108.0)])
    own = iter([1.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr("ksana_jax.lab.runs.machine_load.time.process_time", lambda: next(own))
    load = Load(clock=lambda: next(times))
    assert load.read() is None  # 0.02 s are two ticks
    assert load.read() == pytest.approx((3.0 - 1.0) / 4.0)
    assert load.read() == 0.0  # more of our own than was counted as busy


def test_processes_that_were_started_and_have_ended_are_not_others():
    def clock():  # nobody else ran
        return sum(os.times()[:4]), time.perf_counter()

    load = Load(clock=clock)
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert load.read() < 0.05


def test_compilations_are_counted():
    import jax
    import jax.numpy as jnp

    counter = Compilations()
    try:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(3)).block_until_ready()
        assert counter.read() >= 1
        assert counter.read() == 0
    finally:
        counter.close()


def test_a_benchmark_cannot_be_repeated_less_than_once():
    with pytest.raises(ConfigError, match="repeats is 0, must be at least 1"):
        core.run(Toy(), repeats=0)
