"""A real engine and a simulated one that get the same requests before the same steps."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ksana_jax.core.metrics import StepRecord
from ksana_jax.engine.engine import Engine
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.measuring import exactly
from ksana_jax.lab.simulator.one_engine import SimEngine
from ksana_jax.lab.simulator.replay import ReplayCost
from ksana_jax.lab.trace.recorder import Recorder
from ksana_jax.serve.workload.items import WorkItem
from ksana_jax.serve.workload.synthetic import Synthetic

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
# Compared fields: times and sampled tokens differ.
_TIMES = ("ended_s", "began_s", "schedule_s", "report_s", "compiled")
KINDS = ("rows", "blocks", *(name for name in StepRecord._fields if name not in _TIMES))


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
    """Returns a request whose prompt shares its first tokens with every third one."""
    if not count:
        return item
    prefix = np.random.default_rng(item.index % 3).integers(3, vocab_size, count, np.int32)
    tokens = np.concatenate([prefix, item.tokens()])
    return dataclasses.replace(item, num_prompt=len(tokens), tokens=lambda: tokens)


def compare(engine: Engine, items: Sequence[WorkItem], due: Sequence[int]) -> tuple[Recorder, Recorder]:
    """Serves requests on an engine that has served nothing, and on a simulated one of its settings and its times.

    Args:
      engine: of a model that runs. due: see `step_through`.

    Returns:
      Recordings of both. The simulated engine's steps take the recorded times, so that policies that ask for costs
      decide alike.
    """
    real, answers = Recorder(engine), {}

    def add(item: WorkItem) -> None:
        answers[item.index] = engine.add_request(np.asarray(item.tokens(), np.int32), exactly(item.num_output))

    step_through(engine, items, due, add)
    real.stop()
    outputs = {i: np.array(request.completions[0].token_ids, np.int32) for i, request in answers.items()}
    simulated = SimEngine(
        engine.model,
        engine.config,
        VirtualClock(),
        ReplayCost.of(engine.records),
        patterns=list(engine.executor.patterns),
        platform=getattr(engine.executor, "platform", "cpu"),
    )

    def submit(item: WorkItem) -> None:
        known = outputs[item.index]
        simulated.submit(dataclasses.replace(item, max_tokens=item.num_output, output_tokens=lambda: known))

    again = Recorder(simulated.engine)
    step_through(simulated.engine, items, due, submit)
    return real, again


def step_through(engine: Engine, items: Sequence[WorkItem], due: Sequence[int], add: Callable[[WorkItem], Any]) -> None:
    """Adds each request before the step whose number is due, counted in calls of `step`, and steps until all have
    ended."""
    left, number = sorted(zip(due, range(len(items)), strict=True)), 0
    while left or engine.has_work:
        while left and (left[0][0] <= number or not engine.has_work):
            add(items[left.pop(0)[1]])
        engine.step()
        number += 1
