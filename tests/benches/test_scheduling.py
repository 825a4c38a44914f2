"""`ksana bench scheduling`: two ways of batching, on an engine whose steps take a second."""

import dataclasses
import types

import numpy as np
import pytest

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.bench import scheduling
from ksana_jax.lab.bench.core import Case
from ksana_jax.lab.bench.scheduling import (
    ALONE,
    AT_ONCE,
    ITERATION,
    METHODS,
    PADDED,
    REQUEST,
    Scheduling,
    SimulatedRequest,
)
from ksana_jax.lab.runs.tasks.results import ResultRow


@dataclasses.dataclass
class SecondLongSteps:
    """An engine that gives each of up to `rows` requests a token per step, and whose clock counts steps."""

    rows: int
    now: float = 0.0
    requests: list = dataclasses.field(default_factory=list)
    prompts: list = dataclasses.field(default_factory=list)

    def clock(self):
        return self.now

    def add_request(self, prompt, params):
        self.prompts.append(len(prompt))
        request = types.SimpleNamespace(request_id=len(self.prompts), left=params.max_tokens, finished=False)
        self.requests.append(request)
        return request

    def step(self):
        self.now += 1.0
        running = self.requests[: self.rows]
        for request in running:
            request.left -= 1
            request.finished = not request.left
        self.requests = [request for request in self.requests if not request.finished]
        return running


def serve(method, outputs, arrivals, rows=2):
    engine = SecondLongSteps(rows)
    jobs = [SimulatedRequest(np.arange(3 + i), m, a) for i, (m, a) in enumerate(zip(outputs, arrivals, strict=True))]
    return scheduling.serve(engine, jobs, method, rows, engine.clock), engine


def test_a_request_enters_when_a_row_is_free_or_when_nothing_runs():
    outputs, arrivals = [1, 4, 2, 1], [0.0, 0.0, 0.0, 0.5]
    assert serve(ITERATION, outputs, arrivals)[0] == [1.0, 4.0, 3.0, 4.0]
    # Two batches: answers of the first are there when the fourth token of its second request is.
    assert serve(REQUEST, outputs, arrivals)[0] == [4.0, 4.0, 6.0, 6.0]


def test_padding_makes_all_of_a_batch_as_long_as_its_longest():
    ended, engine = serve(PADDED, [1, 4, 2, 1], [0.0] * 4)
    assert ended == [4.0, 4.0, 6.0, 6.0]
    assert engine.prompts == [4, 4, 6, 6]
    assert serve(REQUEST, [1, 4, 2, 1], [0.0] * 4)[1].prompts == [3, 4, 5, 6]


def test_time_in_which_nothing_runs_is_skipped():
    ended, engine = serve(ITERATION, [2, 1], [0.0, 100.0])
    assert ended == [2.0, 101.0]
    assert engine.now == 3.0


def test_packing_is_the_share_of_places_that_are_asked_for():
    assert scheduling.packing([1, 4, 2, 1], 2) == (1 + 4 + 2 + 1) / (2 * 4 + 2 * 2)
    uniform = np.random.default_rng(0).integers(1, 129, 160_000)
    assert scheduling.packing(uniform.tolist(), 16) == pytest.approx(0.53, abs=0.01)  # 64.5 / 128 x 17/16


def test_the_best_rate_lies_on_the_line_between_two_points():
    curve = [(2.0, 4.0), (4.0, 8.0), (3.0, 9.0)]
    assert scheduling.best_rate(curve, 1.0, 1.5) == 2.0
    assert scheduling.best_rate(curve, 1.0, 2.5) == 5.0
    assert scheduling.best_rate(curve, 1.0, 3.0) == 9.0
    assert scheduling.best_rate(curve, 1.0, 9.0) == 9.0


def row(label, load, latency_s, rate, **others):
    values = {"latency_s": [latency_s], "requests_per_s": [rate], **{k: [v] for k, v in others.items()}}
    return ResultRow(label, {"load": load}, 1, [[]], values)


def test_methods_are_compared_at_limits_of_latency():
    rows = [row(ITERATION, ALONE, 1.0, 0.1)]
    for method, rate in zip(METHODS, (8.0, 2.0, 1.0), strict=True):
        rows += [row(method, 0.5, 2.0, rate, packing=0.5), row(method, AT_ONCE, 9.0, 2 * rate, packing=0.5)]
    said = Scheduling().conclusion(rows)
    assert "(1,000.0 ms per token)" in said and "2 x: 4.0 (8.0 padded)" in said
    bound = Scheduling().notes(rows)[1]
    assert "50% compute a token" in bound and "at most 2.00 times" in bound and "measured: 4.00, and 8.00" in bound
    assert Scheduling().conclusion(rows[1:]) == ""


def test_measured_numbers_are_those_of_the_requests_served(monkeypatch):
    bench = Scheduling(requests=4, rows=2, output=(2, 2))
    bench.capacity, bench.llm = 3.0, types.SimpleNamespace()
    bench.llm = types.SimpleNamespace(engine=None, model_config=types.SimpleNamespace(vocab_size=9))
    asked = []

    def served(engine, jobs, method, rows):
        asked.append((method, rows, [job.arrival_s for job in jobs]))
        return [jobs[0].arrival_s + seconds for seconds in (1.0, 2.0, 3.0, 4.0)]

    monkeypatch.setattr(scheduling, "serve", served)
    found = bench.measure(Case(REQUEST, {"load": AT_ONCE}))
    assert found["requests_per_s"] == 1.0 and found["tokens_per_s"] == 2.0
    assert found["latency_s"] == 1.5 and found["packing"] == 1.0
    assert bench.measure(Case(ITERATION, {"load": ALONE}))["latency_s"] == 0.5
    bench.measure(Case(ITERATION, {"load": 0.5}))
    assert [(method, rows) for method, rows, _ in asked] == [(REQUEST, 2), (REQUEST, 1), (ITERATION, 2)]
    assert asked[0][2] == [0.0] * 4
    twice = bench.jobs(0.75)
    assert [job.arrival_s for job in twice] == pytest.approx([2 * arrival for arrival in asked[2][2]])


def test_bounds_of_lengths_are_checked():
    with pytest.raises(ConfigError, match=r"output is \(5, 2\), must be two numbers from 1"):
        Scheduling(output=(5, 2)).cases()
