"""Exponents of known curves, and the smallest host case."""

import collections

import pytest

from experiments.growth import bench
from experiments.growth.bench import Growth
from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench import command, core

LABEL = "host step of 64 rows, waiting requests"


def report_of(monkeypatch, seconds, repeats=2):
    monkeypatch.setattr(bench, "in_own_process", seconds)
    growth = Growth(only=LABEL)
    return command.report_of(growth, core.run(growth, repeats)[0])


def test_exponents_are_those_of_the_upper_half_and_span_the_repetitions(monkeypatch):
    measured = collections.Counter()

    def seconds(label, size):
        measured[size] += 1
        return {"step_s": 1.0 if size < 200 else size ** (1 + 0.5 * (measured[size] - 1)), "memory_bytes": size**2}

    monkeypatch.setattr(bench, "SERIES", {LABEL: bench.SERIES[LABEL]._replace(sizes=(1, 10, 300, 400, 500, 600))})
    rows = report_of(monkeypatch, seconds).rows
    assert bench.exponents(rows, "memory_bytes") == pytest.approx((2, 2))
    assert bench.exponents(rows, "step_s") == pytest.approx((1, 1.5))


def test_a_number_that_is_not_positive_has_no_exponent(monkeypatch):
    made = report_of(monkeypatch, lambda label, size: {"step_s": size, "memory_bytes": 0})
    assert bench.exponents(made.rows, "memory_bytes") is None and "memory" not in made.notes[0]


def test_a_host_case_is_measured():
    found = bench._measured(LABEL, 3)
    assert 1e-6 < found["step_s"] < 0.1 and found["memory_bytes"] >= 0


def test_a_cost_that_there_is_not_is_an_error():
    with pytest.raises(ConfigError, match="no cost is called 'queues'"):
        Growth(only="queues").cases()
