"""Status of an `AsyncLLM`: a summary of its engines, and why it stopped serving."""

from __future__ import annotations

import dataclasses


class NotServing(RuntimeError):
    """New requests are refused: the engine is draining, closed or dead; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Load of the engines at one moment, summed over replicas.

    num_requests: accepted and not ended. num_sequences: of these requests; n completions of a prompt count n.
    num_running: sequences that hold a row. num_waiting: sequences that wait for one, also again after preemption.
    num_prefill_tokens: prompt tokens of requests that have no first token yet. blocks_in_use, num_blocks: of the pool.
    num_steps_under_way: submitted to the device. is_draining: new requests are refused.
    """

    num_requests: int
    num_sequences: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    blocks_in_use: int
    num_blocks: int
    num_steps_under_way: int
    is_draining: bool
