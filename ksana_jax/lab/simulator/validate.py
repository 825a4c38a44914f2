"""Validation of the simulator: known answers, equal decisions, and predictions of a real engine, with their limits.

Nothing is widened to pass: a check that fails is printed with its error, and the command returns 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ksana_jax.lab.simulator.known_answers import NUM_REQUESTS, Check, known_answers
from ksana_jax.lab.simulator.predicting import Prediction, predict

Say = Callable[[str], None]


def check_known_answers(count: int = NUM_REQUESTS, seeds: int = 5, say: Say = print) -> bool:
    """Checks queues with known answers; prints a table."""
    found = known_answers(count, seeds)
    say(f"Queues with known answers, {seeds} x {count:,} requests each:")
    for check in found:
        say(line(check))
    return all(check.passed for check in found)


def check_prediction(model: str, say: Say = print, **settings: Any) -> bool:
    """Checks the prediction of a workload by costs fitted on another; prints a table."""
    found = predict(model, say=say, **settings)
    show(found, say)
    return all(check.passed for check in found.checks)


def show(found: Prediction, say: Say) -> None:
    """Prints a prediction."""
    for check in found.checks:
        name = check.name
        say(
            f"{line(check)}  without noise {found.without_noise[name]:+.1%}, with the measured times "
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


def line(check: Check) -> str:
    """Returns a check as a line of a table."""
    verdict = "pass" if check.passed else "FAIL"
    values = f"{check.expected:12,.4f} {check.found:12,.4f} {check.error:+8.2%} of {check.limit:.0%}"
    return f"  {check.name:28} {values}  {verdict}"
