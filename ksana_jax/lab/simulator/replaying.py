"""Whether a simulated engine decides as a real one: the same requests before the same steps, compared step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ksana_jax.core.metrics import StepRecord
from ksana_jax.engine.engine import Engine
from ksana_jax.lab.simulator.clock import VirtualClock
from ksana_jax.lab.simulator.measuring import exactly
from ksana_jax.lab.simulator.one_engine import SimEngine
from ksana_jax.lab.simulator.replay import ReplayCost
from ksana_jax.serve.workload.items import WorkItem


@dataclasses.dataclass(frozen=True)
class Decided:
    """What an engine did: its records without times, and for each step its rows: request, tokens before and in the
    step, blocks."""

    records: list[StepRecord]
    steps: list[list[tuple[str, int, int, list[int]]]]


def note_decisions(engine: Engine) -> list[list[tuple[str, int, int, list[int]]]]:
    """Makes an engine note the rows of each step that it builds; returns the list that grows."""
    build, noted = engine.builder.build, []

    def noting(batch: Any, rows: Any) -> Any:
        counts = zip(batch.rows.tolist(), batch.num_per_row.tolist(), strict=True)
        noted.append(
            [
                (rows.seqs[row].request_id, int(rows.num_computed[row]), count, rows.block_ids(row).tolist())
                for row, count in counts
            ]
        )
        return build(batch, rows)

    engine.builder.build = noting  # type: ignore[method-assign]  what it does, and a note of it
    return noted


def step_through(engine: Engine, items: Sequence[WorkItem], due: Sequence[int], add: Callable[[WorkItem], Any]) -> None:
    """Adds each request before the step whose number is due, counted in calls of `step`, and steps until all have
    ended."""
    left, number = sorted(zip(due, range(len(items)), strict=True)), 0
    while left or engine.has_work:
        while left and (left[0][0] <= number or not engine.has_work):
            add(items[left.pop(0)[1]])
        engine.step()
        number += 1


def compare(engine: Engine, items: Sequence[WorkItem], due: Sequence[int]) -> tuple[Decided, Decided]:
    """Serves requests on an engine that has served nothing, and on a simulated one of its settings and its times.

    Args:
      engine: of a model that runs. due: see `step_through`.

    Returns:
      What each decided. The simulated engine's steps take the recorded times, so that policies that ask for costs
      decide alike.
    """
    noted, answers = note_decisions(engine), {}

    def add(item: WorkItem) -> None:
        answers[item.index] = engine.add_request(np.asarray(item.tokens(), np.int32), exactly(item.num_output))

    step_through(engine, items, due, add)
    real = Decided([record.without_times() for record in engine.records], noted)
    outputs = {i: np.array(request.completions[0].token_ids, np.int32) for i, request in answers.items()}
    simulated = SimEngine(
        engine.model,
        engine.config,
        VirtualClock(),
        ReplayCost.of(engine.records),
        patterns=list(engine.executor.patterns),
        platform=getattr(engine.executor, "platform", "cpu"),
    )
    noted = note_decisions(simulated.engine)

    def submit(item: WorkItem) -> None:
        known = outputs[item.index]
        simulated.submit(dataclasses.replace(item, max_tokens=item.num_output, output_tokens=lambda: known))

    step_through(simulated.engine, items, due, submit)
    return real, Decided([record.without_times() for record in simulated.engine.records], noted)
