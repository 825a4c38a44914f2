"""Tests whether costs fitted on one workload predict another: a real engine serves both, a simulated one the second."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.simulator.paced import pace
from ksana_jax.core.metrics import StepRecord
from ksana_jax.engine.engine import Engine
from ksana_jax.lab.simulator.cost import Cost
from ksana_jax.lab.simulator.fit import fit
from ksana_jax.lab.simulator.fitted import FittedCost
from ksana_jax.lab.simulator.measuring import exercise, make_engine, serve, with_known_lengths
from ksana_jax.lab.simulator.one_engine import Served
from ksana_jax.lab.simulator.replay import ReplayCost
from ksana_jax.lab.simulator.run import simulate
from ksana_jax.lab.simulator.step_times import device_seconds, sizes_of
from ksana_jax.serve.workload.base import WorkloadSettings
from ksana_jax.serve.workload.items import WorkItem
from ksana_jax.serve.workload.report import summarise
from ksana_jax.serve.workload.sessions import Sessions
from ksana_jax.serve.workload.synthetic import Synthetic

# Largest relative errors of the prediction.
LIMITS = {"E2E p50": 0.09, "E2E p90": 0.09, "TTFT p90": 0.20, "TPOT p50": 0.05, "output tokens/s": 0.05}
# Share of the rate that the engine reaches when all requests arrive at once.
LOAD = 0.6


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: expected and found value, and the largest relative error allowed."""

    name: str
    expected: float
    found: float
    limit: float

    @property
    def error(self) -> float:
        return self.found / self.expected - 1 if self.expected else math.inf

    @property
    def passed(self) -> bool:
        return abs(self.error) <= self.limit

    def __str__(self) -> str:
        """A line of a table."""
        verdict = "pass" if self.passed else "FAIL"
        values = f"{self.expected:12,.4f} {self.found:12,.4f} {self.error:+8.2%} of {self.limit:.0%}"
        return f"  {self.name:28} {values}  {verdict}"


def workloads(longest: int, num_requests: int, seed: int) -> dict[str, WorkloadSettings]:
    """Returns workloads that are predicted, by name.

    Args:
      longest: maximum tokens of a prompt and of an answer.
    """
    same: dict[str, Any] = {
        "num_requests": num_requests, "seed": seed, "max_prompt": longest, "max_output": longest, "rate": 1.0
    }  # fmt: skip
    lengths = {"prompt": {"p50": 40, "p99": longest}, "output": {"p50": 24, "p99": longest}}
    turns: dict[str, Any] = {
        "turns": 3.0, "think_s": 0.2, "num_systems": 4, "system": 16, "user": [4, 24], "output": [4, 24]
    }  # fmt: skip
    return {
        "poisson": Synthetic(**lengths, **same),
        "bursts": Synthetic(cv=3.0, prompt=[1, longest], output=[1, longest], **same),
        "sessions": Sessions(**turns, **same),
    }


def figures(served: Sequence[Served]) -> dict[str, float]:
    """Returns the predicted figures of a run."""
    report = summarise([one.times for one in served])
    return {
        "E2E p50": report["e2e_s"]["p50"],
        "E2E p90": report["e2e_s"]["p90"],
        "TTFT p90": report["ttft_s"]["p90"],
        "TPOT p50": report["tpot_s"]["p50"],
        "output tokens/s": report["output_tokens_per_s"],
    }


def typical(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the median over rounds of each figure: one round with a stalled machine decides nothing."""
    return {name: float(np.median([round[name] for round in rounds])) for name in LIMITS}


def against_itself(rounds: Sequence[dict[str, float]], draws: int = 200) -> dict[str, float]:
    """Returns the relative difference of each figure between two halves of the rounds.

    It is the median over random halves. Where rounds are independent, the standard error of all of them together is
    about three quarters of it (a half of the difference's standard deviation, which is 1.48 times its median), and a
    prediction without errors of its own would still have errors of that size.

    Args:
      rounds: figures of each, of the same requests; at least two.
    """
    rng, half, differences = np.random.default_rng(0), len(rounds) // 2, []
    for _ in range(draws):
        order = rng.permutation(len(rounds))
        one, other = (typical([rounds[i] for i in part]) for part in (order[:half], order[half:]))
        differences.append([abs(one[name] / other[name] - 1) for name in LIMITS])
    return dict(zip(LIMITS, np.median(differences, axis=0).tolist(), strict=True))


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted and measured figures.

    checks: of LIMITS, medians over rounds, with noise. without_noise: relative errors where steps take their means.
    spread: largest over smallest of each figure among the measured rounds. itself: the measurement against itself,
    see `against_itself`. replayed: relative errors of a simulation
    whose steps take the times of the measured ones: the rest are errors of the simulator, not of costs.
    per_request: of E2E, medians over rounds: mean absolute relative error, bias, and Pearson's correlation.
    speeds: time of each round's steps of many sizes over what the costs say.
    """

    checks: list[Check]
    without_noise: dict[str, float]
    replayed: dict[str, float]
    spread: dict[str, float]
    itself: dict[str, float]
    per_request: dict[str, float]
    speeds: list[float]
    held_out: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Round:
    """The workload that is predicted, between steps of many sizes: its times, and its steps.

    exercised: steps of many sizes before and after it.
    """

    exercised: tuple[list[StepRecord], list[StepRecord]]
    served: list[Served]
    steps: list[StepRecord]


def predict(
    model: str = "ksana-tiny",
    *,
    workload: str = "poisson",
    rounds: int = 20,
    seconds: float = 1.5,
    num_requests: int = 120,
    seed: int = 0,
    paced: Cost | None = None,
    say: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Prediction:
    """Measures and predicts.

    Rounds alternate between steps of many sizes, from which costs are fitted, and the workload that is predicted, at
    LOAD of the rate that the engine reaches. One fit is made of all rounds. A machine that others use is slower for
    seconds at a time, so each round's prediction takes the speed of the steps just before and just after it; no time of
    the predicted workload is used. Measured and predicted medians over rounds are
    compared: one disturbed round of many otherwise decides the p90 of all requests.

    Args:
      workload: a key of `workloads`. seconds: of each round's steps of many sizes. seed: of all that is drawn.
      paced: cost model of the device's steps instead of computing them, see `experiments.simulator.paced`: predictions
        then are free of the changing speed of a CPU. The costs are fitted all the same.
      settings: of the engine.
    """
    chosen = {"max_num_seqs": 16, "max_model_len": 256, "max_num_batched_tokens": 256, "num_blocks": 512, **settings}
    engine = make_engine(model, **chosen)
    if paced is not None:
        pace(engine, paced)
    longest = engine.max_model_len // 2 - 1
    made = workloads(longest, num_requests, seed)[workload].make(engine.model.vocab_size)
    at_once = [dataclasses.replace(item, arrival_s=0.0, after=None) for item in with_known_lengths(made.items)]
    serve(engine, at_once)
    rate = LOAD * len(at_once) / max(s.finished_s for s in serve(engine, at_once))
    items = with_known_lengths(made.scaled(rate).items)
    name = model if paced is None else f"{model} on a paced device"
    say(f"{name}, {workload}: {rate:,.1f} requests/s, {rounds} rounds, load average {os.getloadavg()[0]:.1f}")

    def exercised(number: int) -> list[StepRecord]:
        engine.records.clear()
        exercise(engine, seconds, max_prompt=longest, max_output=longest, seed=seed + number)
        return list(engine.records)

    runs, around = [], [exercised(0)]
    for number in range(rounds):
        engine.records.clear()
        runs.append((serve(engine, items), list(engine.records)))
        around.append(exercised(number + 1))
    measured = [Round(pair, *run) for pair, run in zip(itertools.pairwise(around), runs, strict=True)]
    cost = fit([record for records in around for record in records], {"config": engine.config.plain()})
    return _compare(engine, items, cost, measured, seed)


def speed(cost: FittedCost, records: Sequence[StepRecord]) -> float:
    """Returns the time of steps over what the costs say."""
    return sum(device_seconds(records)) / sum(map(cost.seconds, sizes_of(records)))


def _compare(
    engine: Engine, items: Sequence[WorkItem], cost: FittedCost, measured: Sequence[Round], seed: int
) -> Prediction:
    def simulated(cost: Cost, seed: int | None = None) -> list[Served]:
        return simulate(items, engine.model, engine.config, cost, seed=seed).served

    speeds = [math.sqrt(math.prod(speed(cost, records) for records in one.exercised)) for one in measured]
    noisy = [simulated(cost.times(s), seed + i) for i, s in enumerate(speeds)]
    plain = [simulated(cost.times(s)) for s in speeds]
    replayed = [simulated(ReplayCost.of(one.steps, spare=len(one.steps))) for one in measured]
    each = [figures(one.served) for one in measured]
    real = typical(each)
    found, without, again = (typical([figures(served) for served in runs]) for runs in (noisy, plain, replayed))
    by_request, predicted = (
        np.median([[s.finished_s - s.arrival_s for s in served] for served in runs], axis=0)
        for runs in ([one.served for one in measured], plain)
    )
    errors = predicted / by_request - 1
    return Prediction(
        [Check(name, real[name], found[name], limit) for name, limit in LIMITS.items()],
        {name: without[name] / real[name] - 1 for name in LIMITS},
        {name: again[name] / real[name] - 1 for name in LIMITS},
        {name: max(f[name] for f in each) / min(f[name] for f in each) for name in LIMITS},
        against_itself(each) if len(measured) > 1 else {},
        {
            "mape": float(np.abs(errors).mean()),
            "bias": float(errors.mean()),
            "pearson": float(np.corrcoef(predicted, by_request)[0, 1]),
        },
        speeds,
        dict(cost.provenance["held_out"]),
    )


def check_prediction(model: str, say: Callable[[str], None] = print, **settings: Any) -> bool:
    """Checks the prediction of a workload by costs fitted on another; prints a table."""
    found = predict(model, say=say, **settings)
    show(found, say)
    return all(check.passed for check in found.checks)


def show(found: Prediction, say: Callable[[str], None]) -> None:
    """Prints a prediction."""
    for check in found.checks:
        name = check.name
        say(
            f"{check}  without noise {found.without_noise[name]:+.1%}, with the measured times "
            f"{found.replayed[name]:+.1%}, rounds differ by {found.spread[name]:.2f} x"
            + (f", halves of them by {found.itself[name]:.1%}" if found.itself else "")
        )
    by = found.per_request
    say(f"  E2E of single requests: MAPE {by['mape']:.1%}, bias {by['bias']:+.1%}, Pearson {by['pearson']:.3f}")
    for phase, errors in found.held_out.items():
        say(
            f"  {phase} steps held out: {errors['num_steps']:,}, MAPE {errors['mape']:.1%}, "
            f"sum {errors['error_of_the_sum']:+.1%}"
        )
    say(f"  time of the rounds' steps over the costs: {', '.join(f'{s:.2f}' for s in found.speeds)}")
