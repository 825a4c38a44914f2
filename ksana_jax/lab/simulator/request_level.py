"""Batching by request, as FasterTransformer does it, timed by the same model of costs as the engine. Knows no engine.

A batch is taken when nothing runs. Its prompts are padded to the longest, it decodes until the longest answer ends, and
all answers return together. The cost follows from lengths alone, so no step is scheduled.

Source: ORCA (OSDI 2022), section 2. `experiments/benches/scheduling.py` measures the same on a real engine.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ksana_jax.core.errors import ConfigError
from ksana_jax.lab.simulator.cost import Cost
from ksana_jax.lab.simulator.step_size import StepSize
from ksana_jax.scheduler.step.types import StepShape, TileGroup
from ksana_jax.serve.workload.items import WorkItem
from ksana_jax.serve.workload.report import RequestTimes


def serve(items: Sequence[WorkItem], cost: Cost, max_num_seqs: int) -> list[RequestTimes]:
    """Serves requests in the order of their arrival, in batches of at most max_num_seqs.

    Returns:
      Their times. Answers are not streamed: the first token arrives with the last.

    Raises:
      ConfigError: a request waits for another to end, as turns of a session do.
    """
    if any(item.after is not None for item in items):
        raise ConfigError("request-level batching is modelled for single requests, not for sessions")
    waiting = sorted(items, key=lambda item: (item.arrival_s, item.index))
    arrivals = [item.arrival_s for item in waiting]
    found: list[RequestTimes] = []
    now, begin = 0.0, 0
    while begin < len(waiting):
        now = max(now, arrivals[begin])
        batch = waiting[begin : min(bisect.bisect_right(arrivals, now), begin + max_num_seqs)]
        longest = max(item.num_prompt for item in batch), max(item.num_output for item in batch)
        now += sum(seconds(len(batch), *longest, cost))
        found += [
            RequestTimes(item.index, item.arrival_s, now, now, item.num_prompt, item.num_output) for item in batch
        ]
        begin += len(batch)
    return found


def seconds(rows: int, num_prompt: int, num_output: int, cost: Cost) -> tuple[float, float]:
    """Returns the seconds that `rows` equal requests take to compute their prompts in one step, and then decode."""
    prompts = StepSize(
        StepShape((TileGroup(rows, num_prompt),), num_prompt, rows),
        num_sampled=rows,
        num_tokens=rows * num_prompt,
        num_chunked=rows * num_prompt,
        num_attended=rows * num_prompt * (num_prompt + 1) // 2,
        num_rows=rows,
    )
    decode = StepSize(StepShape((TileGroup(rows, 1),), num_prompt + num_output, rows), rows, rows, 0, 0, rows)
    sizes = (decode._replace(num_attended=rows * (num_prompt + done + 1)) for done in range(num_output - 1))
    return _of_step(cost, prompts), sum(_of_step(cost, size) for size in sizes)


def _of_step(cost: Cost, size: StepSize) -> float:
    return cost.seconds(size) + cost.host_seconds(size)


def packing(outputs: Sequence[int], rows: int) -> float:
    """Returns the share of useful tokens if requests form batches in order, each padded to its longest output."""
    batches = [outputs[i : i + rows] for i in range(0, len(outputs), rows)]
    return sum(outputs) / sum(len(batch) * max(batch) for batch in batches)
