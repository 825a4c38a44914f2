"""Validation of the simulator: known answers, equal decisions, and predictions of a real engine, with their limits.

Nothing is widened to pass: a check that fails is printed with its error, and the command returns 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ksana_jax.lab.simulator.known_answers import NUM_REQUESTS, Check, known_answers
from ksana_jax.lab.simulator.measuring import make_engine
from ksana_jax.lab.simulator.predicting import Prediction, predict
from ksana_jax.lab.simulator.replaying import Decided, compare
from ksana_jax.serve.workload.items import WorkItem
from ksana_jax.serve.workload.synthetic import Synthetic

Say = Callable[[str], None]

# Settings of the engines that are compared.
COMPARED: Mapping[str, Any] = {
    "max_num_seqs": 8,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
}
# A pool for all, one that preempts, and one that swaps to the host.
POOLS: Mapping[str, Mapping[str, Any]] = {
    "plenty": {"num_blocks": 512},
    "tight pool": {"num_blocks": 14},
    "host tier": {"num_blocks": 14, "host_cache_bytes": 2**24, "preempt": "swap"},
}


def check_known_answers(count: int = NUM_REQUESTS, seeds: int = 5, say: Say = print) -> bool:
    """Checks queues with known answers; prints a table."""
    found = known_answers(count, seeds)
    say(f"Queues with known answers, {seeds} x {count:,} requests each:")
    for check in found:
        say(line(check))
    return all(check.passed for check in found)


def workloads(vocab_size: int) -> dict[str, tuple[list[WorkItem], list[int]]]:
    """Returns three small workloads, each with the steps before which its requests come."""
    rng = np.random.default_rng(0)
    found = {}
    for name, most_prompt, prefix in (("short", 30, 0), ("long", 100, 0), ("shared prefix", 20, 64)):
        asked = Synthetic(rate=1.0, num_requests=24, prompt=[1, most_prompt], output=[1, 60], seed=len(found))
        items = [_after_prefix(item, prefix, vocab_size) for item in asked.make(vocab_size).items]
        found[name] = items, rng.integers(0, 60, len(items)).tolist()
    return found


def _after_prefix(item: WorkItem, count: int, vocab_size: int) -> WorkItem:
    """Returns a request whose prompt begins with tokens that those of every third one have too."""
    if not count:
        return item
    prefix = np.random.default_rng(item.index % 3).integers(3, vocab_size, count, np.int32)
    tokens = np.concatenate([prefix, item.tokens()])
    return dataclasses.replace(item, num_prompt=len(tokens), tokens=lambda: tokens)


def check_decisions(model: str, say: Say = print) -> bool:
    """Compares the decisions of a real engine with those of a simulated one; prints a table."""
    say(f"Decisions of a simulated engine and of {model}, step by step:")
    right = True
    for pool, settings in POOLS.items():
        for workload in ("short", "long", "shared prefix"):
            engine = make_engine(model, **COMPARED, **settings)
            items, due = workloads(engine.model.vocab_size)[workload]
            real, simulated = compare(engine, items, due)
            same = real == simulated
            right &= same
            preempted = real.records[-1].num_preemptions
            what = f"{len(real.steps):,} steps, {preempted} preemptions"
            say(f"  {pool + ', ' + workload:28} {what:32} {'equal' if same else first_difference(real, simulated)}")
            del engine
    return right


def first_difference(real: Decided, simulated: Decided) -> str:
    """Says where two engines first decided otherwise."""
    pairs = zip(real.steps, simulated.steps, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        pairs = zip(real.records, simulated.records, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(real.records), len(simulated.records)))
    return f"DIFFERENT from step {at} of {len(real.steps)} and {len(simulated.steps)}"


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
